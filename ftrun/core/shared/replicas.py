"""Detects corrupt replicas by their checksums. Workers, before they open a gate, and the launcher apply the same rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ftrun.core.shared.board import Cell, F, sum_of


def corrupt(sums: Sequence[int], trusted: Sequence[bool]) -> tuple[int, ...]:
    """Return the indices that differ from a strict majority; () if all agree or no majority decides.

    `trusted[i]`: replica i knew that all were equal before. Ranks that never held the same weights are no replicas.
    """
    if len(set(sums)) <= 1:
        return ()
    value, count = Counter(sums).most_common(1)[0]
    if 2 * count <= len(sums) or not any(trusted):
        return ()
    return tuple(i for i, found in enumerate(sums) if found != value)


def equal_at(number: int, cells: Sequence[Cell]) -> bool:
    """Were all replicas compared at gate `number`, and equal? False if no rank has a replica."""
    groups: dict[int, list[Cell]] = {}
    for cell in cells:
        if cell[F.REPLICAS]:
            groups.setdefault(cell[F.REPLICAS], []).append(cell)
    facts = [[(sum_of(c[F.SUM_AT])[0], c[F.SUM], c[F.PYTHON_SUM]) for c in group] for group in groups.values()]
    return bool(facts) and all(len(g) > 1 and len(set(g)) == 1 and g[0][0] == number for g in facts)


def undecided(sums: Sequence[int], trusted: Sequence[bool]) -> bool:
    """Do replicas that were equal before differ now, without a majority that shows which one is corrupt?"""
    return len(set(sums)) > 1 and any(trusted) and not corrupt(sums, trusted)
