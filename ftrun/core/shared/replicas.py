"""Detects corrupt replicas by their checksums. Workers, before they open a gate, and the launcher apply the same rule.

Of one node the launcher reads all checksums on the board. Of several nodes only the ranks that open the gate have them all: each marks
those of its node that are corrupt (F.CORRUPT), and its launcher replaces them.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ftrun.core.shared.board import Cell, F, sum_of


class SumRow(NamedTuple):
    """The checksums of one rank: of weights and optimizer state, and of hyperparameters. `replicas`: `name_of` those that hold the same.

    `trusted`: it knew that all were equal before.
    """

    rank: int
    replicas: int
    sum: int
    python: int
    trusted: bool


def sum_row(cell: Cell, number: int) -> SumRow | None:
    """Return the checksums that a rank made for gate `number`; None if it made none."""
    at, trusted = sum_of(cell[F.SUM_AT])
    if not cell[F.REPLICAS] or at != number:
        return None
    return SumRow(cell.rank or 0, cell[F.REPLICAS], cell[F.SUM], cell[F.PYTHON_SUM], trusted)


def grouped(rows: Iterable[SumRow]) -> dict[int, list[SumRow]]:
    """Return the rows of ranks that hold the same together, by the word that names these."""
    groups: dict[int, list[SumRow]] = {}
    for row in rows:
        groups.setdefault(row.replicas, []).append(row)
    return groups


def name_of(ranks: Collection[int]) -> int:
    """Return a word that names a set of ranks which hold the same, with their number in its upper half; 0 is no such word."""
    return len(ranks) << 32 | zlib.crc32(str(sorted(ranks)).encode())


def size_of(name: int) -> int:
    """Return how many ranks `name_of` named."""
    return name >> 32


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


def corrupt_ranks(groups: Iterable[Sequence[SumRow]]) -> frozenset[int]:
    """Return the ranks that differ from most of their replicas, of groups that are whole: of a part the wrong ones may be most."""
    return frozenset(
        rows[index].rank
        for rows in groups
        if len(rows) >= size_of(rows[0].replicas)
        for index in corrupt([row.sum for row in rows], [row.trusted for row in rows])
    )


def equal_at(number: int, cells: Sequence[Cell]) -> bool:
    """Were all replicas compared at gate `number`, and equal? False if no rank has a replica."""
    rows = [sum_row(cell, number) for cell in cells if cell[F.REPLICAS]]
    known = [row for row in rows if row is not None]
    alike = all(len(those) > 1 and len({(row.sum, row.python) for row in those}) == 1 for those in grouped(known).values())
    return bool(rows) and len(known) == len(rows) and alike


def equal_over_nodes(number: int, cells: Sequence[Cell], compared: bool) -> bool:
    """Say the same of one of several nodes. `compared`: the last comparison over all nodes found all replicas equal (Head.EQUAL)."""
    return compared and any(c[F.REPLICAS] and sum_of(c[F.SUM_AT])[0] == number for c in cells)


def undecided(sums: Sequence[int], trusted: Sequence[bool]) -> bool:
    """Do replicas that were equal before differ now, without a majority that shows which one is corrupt?"""
    return len(set(sums)) > 1 and any(trusted) and not corrupt(sums, trusted)
