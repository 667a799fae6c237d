"""Decides which spare node takes a place, keeps it for that, and writes that it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from ftrun.host.nodes.carriers.carrier import Carrier, Record
from ftrun.host.nodes.membership.seats import Seats
from ftrun.host.nodes.membership.sights import Sights
from ftrun.host.nodes.membership.table import Node, RoundTable
from ftrun.host.nodes.membership.terms import Me, MemberTerms
from ftrun.host.nodes.membership.together import Together


class Takers:
    """What agent `me` sees of spare nodes. A view is that of the records."""

    def __init__(self, carrier: Carrier, me: Me, terms: MemberTerms, sights: Sights) -> None:
        self._carrier = carrier
        self._me = me
        self._terms = terms
        self._sights = sights

    def taker(self, view: Mapping[str, Record], table: RoundTable, at: int, drained: bool = False) -> Node | None:
        """Return the spare node that may take place `at`: the first that came with as many ranks; None if there is none.

        `drained`: the place is given up, which costs nothing of what lost nodes may.
        """
        spent = not drained and Seats(view, table.round).lost >= self._terms.replacements
        if spent or not self._terms.replaces or (table.members[at].id == self._me.id and self._carrier.serves):
            return None
        _, *waiting = self._sights.joiners(table.round + 1)
        # one that has just been given a place may not know it yet, and still says that it waits
        free = [who for who in waiting if table.index(who) is None and view.get(_claim(table, who), {}).get("node", at) == at]
        found = next((r for who in free if (r := view.get(f"agent.{who}", {})).get("nproc") == table.members[at].nproc), None)
        return None if found is None else Node(found["id"], found["host"], found["addr"], int(found["nproc"]))

    def claimed(self, view: Mapping[str, Record], table: RoundTable, at: int, drained: bool = False) -> Node | None:
        """Return the spare node that may take place `at`, and keep it for that; None if there is none."""
        while (spare := self.taker(view, table, at, drained)) is not None:
            claim = _claim(table, spare.id)
            if claim in view or self._carrier.create(claim, {"node": at}):
                break
            view = self._carrier.view()  # another node was faster
        return spare

    @staticmethod
    def seat(together: Together, table: RoundTable, at: int, spare: Node, kind: str, cause: str) -> bool:
        """Begin an incident in which a spare node takes place `at`; False: another one began first."""
        about = {"kind": kind, "node": at, "host": table.members[at].host, "cause": f"{cause}, and {spare.host} takes its place"}
        return together.stops(together.newest + 1, {**about, "seat": asdict(spare)})


def _claim(table: RoundTable, spare: str) -> str:
    return f"claim.{table.round}.{spare}"
