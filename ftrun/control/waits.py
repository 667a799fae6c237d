"""Finds who waits for whom when every rank waits, over all process groups, from what the board says of each rank.

A rank in a collective waits for the members of its group that have not entered it; one in a send or a receive for its peer;
one at the gate for all that are not there. Those waits lead to a ring of ranks, each of which waits for another, or to a rank
that waits for nobody, since all have come to what it waits in. Only ranks at such an end can be to blame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Sign(NamedTuple):
    """Signs of life of one rank. `mark` changes with every sign, `python` with every look of its control thread.

    `waits`: in a collective or at the gate. `life`: when it last showed life, seconds on the clock of whoever looks; 0 = not known.
    """

    cell: int
    mark: tuple[int, ...]
    python: int
    waits: bool
    life: float = 0.0


class Silence(NamedTuple):
    """For how many seconds a rank has shown no sign of life, and for how many no Python of it has run."""

    still: float
    python: float


@dataclass(frozen=True)
class Rank:
    """Board data of one rank that may hold up others.

    `waiting`: inside a collective: number `number` of `group` (0 = the whole world) since its step was handed out; or, with a
    `peer` (a rank), in a send or receive. `members`: the ranks of that group, empty = not known. `counts`: of each group that is
    known, how many of its collectives the rank has entered; `all_counted` False: it may have groups beside these. `excuse`: first,
    call, compiling, outside (of a body) or "". `counted`: the generation in which that count began; ranks of several cannot be compared.
    `cut`: a collective of its failed in this world. `looping` False: it has not begun, or has left the loop. `silence`: as the node of
    the rank tells it, None = it is a rank of this node, whose signs `hangs.Watch` sees.
    """

    rank: int
    cell: int
    step: int
    looping: bool
    waiting: bool
    at_gate: bool
    group: int
    number: int
    name: str
    excuse: str
    peer: int = -1
    members: tuple[int, ...] = ()
    counts: tuple[tuple[int, int], ...] = ()
    all_counted: bool = True
    counted: int = 0
    cut: bool = False
    silence: Silence | None = None

    @property
    def in_collective(self) -> bool:
        return self.waiting and self.peer < 0

    def lacks(self, group: int, number: int) -> bool:
        """Has the rank certainly not entered this collective of `group` since its step was handed out?"""
        if self.group == group and self.peer < 0 and self.number >= number:
            return False
        return dict(self.counts).get(group, 0 if self.all_counted else number) < number


def split(here: Sequence[Rank]) -> tuple[list[Rank], list[Rank]]:
    """Return those to blame and those who wait for them: the smaller of the sides in and out of a collective, over all of them.

    One rank that left a collective out, or called one too many, is likelier than several that did the same. Both lists are empty
    when two smallest sides differ, or when the ranks that wait in a collective disagree on its name or step.
    """
    if not _comparable(here):
        return [], []
    sides = []
    left = [*_collectives(here)]
    for end in _ends(here) if left else ():
        for present, absent in left:
            if not end.intersection(r.rank for r in absent) or (
                len(end) > 1 and not end.intersection(r.rank for r in present)
            ):
                continue  # they wait, in the end, for others
            if len({(r.step, r.name) for r in present}) > 1:
                return [], []
            sides += [(absent, present), (present, absent)]
    fewest = min((len(side) for side, _ in sides), default=0)
    found = [(side, others) for side, others in sides if len(side) == fewest]
    if not found or any(side != found[0][0] for side, _ in found):
        return [], []
    return found[0]


def for_ever(here: Sequence[Rank]) -> bool:
    """Do some of them certainly wait for ever, each for another to come to a collective or to the gate?

    A rank whose collective has everybody in it, or that waits for a message, may get what it waits for: much data takes time.
    """
    if not _comparable(here):
        return False
    awaited = _all_awaited(here)
    reach = _reach({r.rank: frozenset() if r.waiting and r.peer >= 0 else awaited[r.rank] for r in here})
    return any(rank in found for rank, found in reach.items())


def _comparable(here: Sequence[Rank]) -> bool:
    """Do all count their collectives from the same repair on?"""
    return len({r.counted for r in here}) <= 1


def _collectives(here: Sequence[Rank]) -> Iterator[tuple[list[Rank], list[Rank]]]:
    """Yield, for each collective that a rank waits in and another has not entered, the ranks in it and those members."""
    for group, number in sorted({(r.group, r.number) for r in here if r.in_collective}):
        present = [r for r in here if r.in_collective and (r.group, r.number) == (group, number)]
        absent = [r for r in _members(present[0], here) if r.lacks(group, number)]
        if absent:
            yield present, absent


def _members(rank: Rank, here: Sequence[Rank]) -> list[Rank]:
    """Return the members of the group that it waits in, as far as they are known."""
    among = frozenset(rank.members)
    return [r for r in here if r.rank in among or (rank.group == 0 and not among)]


def _all_awaited(here: Sequence[Rank]) -> dict[int, frozenset[int]]:
    """Return whom each rank waits for. Ranks at the same place wait for the same: a world may have hundreds of them."""
    found: dict[object, frozenset[int]] = {}
    awaited = {}
    for r in here:
        place = (r.group, r.number, r.peer, r.members) if r.waiting else None
        if place not in found:
            found[place] = frozenset(w.rank for w in _awaited(r, here))
        awaited[r.rank] = found[place]
    return awaited


def _awaited(rank: Rank, here: Sequence[Rank]) -> list[Rank]:
    if not rank.waiting:
        return [r for r in here if not r.at_gate]
    if rank.peer >= 0:
        return [r for r in here if r.rank == rank.peer]
    return [r for r in _members(rank, here) if r.lacks(rank.group, rank.number)]


def _ends(here: Sequence[Rank]) -> list[frozenset[int]]:
    """Return the sets of ranks each of which waits, directly or not, for all of its set and for nobody outside it."""
    reach = _reach(_all_awaited(here))
    ends = {found | {rank} for rank, found in reach.items() if all(rank in reach[o] for o in found)}
    return sorted(ends, key=min)


def _reach(awaited: dict[int, frozenset[int]]) -> dict[int, frozenset[int]]:
    """Return whom each rank waits for, directly or not. Ranks that wait for the same are looked at once."""
    before, reach = None, {found: found for found in awaited.values()}
    nexts = {found: {awaited[other] for other in found} for found in reach}
    while reach != before:
        before = reach
        reach = {found: far.union(*(before[other] for other in nexts[found])) for found, far in reach.items()}
    return {rank: reach[found] for rank, found in awaited.items()}
