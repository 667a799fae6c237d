"""What each node of a run shows of itself, as one agent sees it: the news "seen". Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ftrun.host.nodes.carriers.carrier import Record
from ftrun.host.nodes.membership.sights import Sights
from ftrun.host.nodes.membership.table import RoundTable

_SILENT = 3.0  # seconds without a beat that are worth a word


def nodes(view: Mapping[str, Record], table: RoundTable, sights: Sights, me: str) -> list[Record]:
    """Return an entry for each node of the round, in its order, then one for each that waits as a spare.

    Keys: node (index or None for a spare one), id, host, nproc, state, shows, here (is it this node?), silent (whole seconds without a
    sign of it, 0 = it lives).
    """

    def entry(who: str, at: int | None, host: str, nproc: int) -> Record:
        record, quiet = view.get(f"agent.{who}", {}), sights.silent(who)
        state = str(record.get("state", ""))
        if at is not None and state not in ("left", "finished") and sights.vanished(who):
            state = "lost"
        about = {"node": at, "id": who, "host": host, "nproc": nproc, "here": who == me}
        return {**about, "state": state, "silent": int(quiet) if quiet > _SILENT else 0, "shows": record.get("shows", {})}

    waiting = [who for who in sights.joiners(table.round + 1) if table.index(who) is None]
    spares = (view[f"agent.{who}"] for who in sorted(waiting) if f"agent.{who}" in view)
    members = [entry(member.id, at, member.host, member.nproc) for at, member in enumerate(table.members)]
    return members + [entry(spare["id"], None, str(spare["host"]), int(spare["nproc"])) for spare in spares]
