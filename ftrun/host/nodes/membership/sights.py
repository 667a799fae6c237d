"""Tells from records that change, or do not, which of the other agents live. Pure: the time comes with each look.

An agent is alive while its record changes: never is its clock compared with ours. It is gone at once if its record or its guardian says so.
Of an agent that has ranks a connection that closed is no such word: they end within `keep_alive`, or its guardian has ended them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftrun.host.nodes.carriers.carrier import Record
from ftrun.host.nodes.membership.terms import MemberTerms, fits

_UNSEEN = 0.25  # the most of `keep_alive` that the time between two looks counts as silence of the others


class _Sight:
    """What was seen of one agent. `moved`: its record changed before our eyes."""

    def __init__(self, beat: Any, now: float, order: int) -> None:
        self.beat = beat
        self.changed = now  # since then it stands still
        self.new = True  # the last look saw another beat
        self.moved = False
        self.order = order


class Sights:
    """What agent `me` saw of the others. After `terms.keep_alive` seconds without a change one counts as gone."""

    def __init__(self, me: str, terms: MemberTerms, now: float) -> None:
        self._me = me
        self._terms = terms
        self._now = now
        self._view: Mapping[str, Record] = {}
        self._seen: dict[str, _Sight] = {}
        self._ended: set[str] = set()

    def __len__(self) -> int:
        """Count the agents that were ever seen."""
        return len(self._seen)

    def look(self, view: Mapping[str, Record], now: float) -> None:
        """Take in the records as they are now; `now`: when the look at them began."""
        unseen = max(0.0, now - self._now - self._terms.keep_alive * _UNSEEN)
        self._view, self._now = view, now
        for sight in self._seen.values():
            sight.changed += unseen  # this agent was frozen, or its look took long: it knows little of the others then
        for name, record in view.items():
            kind, _, who = name.partition(".")
            if kind != "agent" or who == self._me:
                continue
            beat = (record.get("beat"), record.get("state"), record.get("round"))
            if who not in self._seen:
                self._seen[who] = _Sight(beat, now, len(self._seen))
                continue
            sight = self._seen[who]
            new = sight.beat != beat
            if new or sight.new:  # the look that saw a beat may have begun before the beat: what counts begins with the next one
                sight.changed = now
            sight.beat, sight.new, sight.moved = beat, new, sight.moved or new

    def ended(self, who: str) -> None:
        """Take in the word of an agent's guardian: its launcher and its ranks have ended."""
        self._ended.add(who)

    def vanished(self, who: str) -> bool:
        if who == self._me:
            return False
        record, sight = self._record(who), self._seen.get(who)
        if record.get("state") == "left" or who in self._ended:
            return True
        if record.get("gone") and record.get("state") == "joining":  # the ranks of a member may live on behind a broken connection
            return True
        if sight is None:  # its record was removed before we came
            return not record
        return self._now - sight.changed > self._terms.keep_alive

    def waiting(self, target: int) -> list[str]:
        """Return the other living agents that wait for round `target`, in the order in which they came."""
        return [who for who in self._seen if self._waits(who, target)]

    def joiners(self, target: int) -> list[str]:
        """Return this agent, then those of `waiting` whose terms fit."""
        return [self._me, *(who for who in self.waiting(target) if fits(self._terms, self._record(who)))]

    def lives(self, who: str) -> bool:
        """Was an agent seen to move, and not long ago?"""
        return who in self._seen and self._seen[who].moved and not self.vanished(who)

    def order(self, who: str) -> int:
        """Return the place of an agent among all, in the order in which they came; this one's is -1."""
        sight = self._seen.get(who)
        return sight.order if sight is not None else -1

    def silent(self, who: str) -> float:
        """Return the seconds since an agent was last seen to move."""
        sight = self._seen.get(who)
        return self._now - sight.changed if sight is not None else 0.0

    def _waits(self, who: str, target: int) -> bool:
        record = self._record(who)
        waits = record.get("state") == "joining" and record.get("round") == target
        return waits and self.lives(who)

    def _record(self, who: str) -> Record:
        return self._view.get(f"agent.{who}", {})
