"""Compare replicas by checksums of their weights, optimizer state and hyperparameters, which each rank writes to the board.

The rank that opens a gate compares them first: at the first gates, every so many steps, in the first step after a repair, and after the
last step of a loop; at every gate if only the script's word makes ranks replicas. Those have no majority: a difference proves
that the word is wrong, not which rank is. The closing line of a run rests on these comparisons.
"""

from __future__ import annotations

import sys
import zlib
from typing import Any

from ftrun import native
from ftrun.core.shared.board import F, Head, Inexact, sum_word
from ftrun.core.shared.replicas import SumRow, corrupt_ranks, grouped, name_of, size_of, sum_row
from ftrun.worker.link.observer import StepObserver
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.arena import Arena, Entry
from ftrun.worker.repair.handover import fetch
from ftrun.worker.state.protected_state import ProtectedState

REPLICAS_EVERY = 100  # steps between two comparisons, unless a person chooses otherwise: every rank must know which
_FIRST_CHECKS = 2  # gates at the start of a run, where ranks that are no replicas should differ


class ReplicaCheck(StepObserver):
    """Compares replicas at the gates above, with `every` steps between two regular comparisons."""

    def __init__(self, context: Context, state: ProtectedState, every: int) -> None:
        self._context = context
        self._state = state
        self._every = every
        self._ranks: frozenset[int] = frozenset()  # ranks that hold the same part of the state as this one
        self._compared = False  # was it ever compared? Results of other states prove nothing about this rank's
        self._agreed = -1  # number of the last gate that may open
        self._generation = 0  # generation of the last body
        self._told = False

    def due(self, number: int) -> bool:
        """Are replicas compared at the next gate, whose number this is? Every rank answers the same."""
        if number < _FIRST_CHECKS or number % self._every == 0 or 1 < self._context.generation != self._generation:
            return True
        holders = self._state.holders
        return holders.by_word and holders.rest_on_word

    def gate_reached(self, number: int, optimizer: Any, grads: list[Any]) -> None:
        """Publish this rank's checksums if a comparison is due."""
        due = self.due(number)
        self._generation, self._agreed = self._context.generation, -1 if due else number
        if due:
            self._publish(number)

    def loop_ending(self, number: int) -> None:
        self._agreed = -1
        self._publish(number)

    def _publish(self, number: int) -> None:
        holders, world, cell = self._state.holders, self._context.world, self._context.cell
        self._ranks = holders.comparable()
        if world is None or len(self._ranks) < 2:
            cell[F.SUM_AT] = cell[F.REPLICAS] = 0
            return
        value, python = 0, 0
        for entry in self._entries():
            value = self._state.arena.checksum(entry, value)
        for packed in self._state.python.hyperparameters():
            python = zlib.crc32(packed, python)
        cell[F.SUM_AT] = 0
        cell[F.SUM], cell[F.PYTHON_SUM], cell[F.REPLICAS] = value, python, name_of(self._ranks)
        trusted = self._compared and bool(self._context.board[Head.EQUAL]) and not holders.rest_on_word
        cell[F.SUM_AT] = sum_word(number, trusted)
        self._compared = True

    def _entries(self) -> list[Entry]:
        return list(self._state.holders.entries(self._state.manifest, self._ranks))

    def may_open(self, number: int) -> bool:
        """Compare for all ranks, before this one opens the gate. False: the launcher must first replace one with corrupt weights."""
        world = self._context.world
        if self._agreed == number or (world is not None and world.span is not None):
            return True  # several nodes compare all of their ranks: `sums_gathered`
        groups = grouped(row for cell in self._context.cells() if (row := sum_row(cell, number)))
        if corrupt_ranks(groups.values()):
            return False
        self._agreed = number
        self._compare(number, groups)
        return True

    def sums_gathered(self, number: int, rows: list[SumRow]) -> bool:
        """Compare for this node, as the others do. False: a launcher must first replace a rank with corrupt weights, here or there."""
        groups = grouped(rows)
        corrupt = corrupt_ranks(groups.values())
        if corrupt:
            self._mark(corrupt)
        else:
            self._compare(number, groups)
        return not corrupt

    def _mark(self, corrupt: frozenset[int]) -> None:
        """Show the launcher which ranks of this node are corrupt."""
        for cell in self._context.cells():
            if cell.rank in corrupt:
                cell[F.CORRUPT] = 1
        self._context.board.launcher_bell.ring()

    def _compare(self, number: int, groups: dict[int, list[SumRow]]) -> None:
        """Keep for later gates whether all replicas are equal, and report those that are not."""
        whole = bool(groups) and all(len(those) == size_of(replicas) for replicas, those in groups.items())
        # on the board, before the gate opens: the others need it to judge later, even if this rank dies
        self._context.board[Head.EQUAL] = whole and all(len({row.sum for row in those}) == 1 for those in groups.values())
        for one, *others in groups.values():
            other = next((row for row in others if (row.sum, row.python) != (one.sum, one.python)), None)
            if other is not None:
                self._differ(number, one, other)

    def _differ(self, number: int, one: SumRow, other: SumRow) -> None:
        """Report two ranks that should hold the same and do not, where no majority tells which is wrong."""
        by_word = self._state.holders.rest_on_word
        self._context.note_inexact(Inexact.REPLICAS_DIFFER)
        if not self._context.board[Head.DIFFER]:
            self._context.board[Head.DIFFER] = number + 1  # before the gate opens: this rank may die after it
        if self._told:
            return
        self._told = True
        what = self._first_difference(one.rank, other.rank) if one.sum != other.sum else "a hyperparameter of the optimizer"
        void = "; protect(replicas=...) is void: no rank gets the values of another one" if by_word else ""
        print(
            f"ftrun: ranks that should hold the same differ at the gate of step {self._context.position.index_of(number)}: "
            f"{what} of rank {one.rank} and rank {other.rank}; the result is not known to be that of an uninterrupted run{void}",
            file=sys.stderr,
            flush=True,
        )

    def _first_difference(self, one: int, other: int) -> str:
        """Return the name of a tensor that differs between two ranks, if this rank can compare their arenas."""
        found = [fetch(self._context, rank, "arena") for rank in (one, other)]
        arenas = [Arena(segment) for segment in found if segment is not None]
        for entry in self._entries() if len(arenas) == 2 and one in self._ranks else ():
            places = [arena.segment.address + entry.offset for arena in arenas]
            if not entry.on_gpu and len({native.checksum(place, entry.block) for place in places}) == 2:
                return entry.name
        return "weights or optimizer state"

    def replaced(self) -> None:
        """Note a doubt if the predecessor was corrupt: nobody knows what it spoilt before."""
        context = self._context
        before = context.predecessor()
        if before is not None and before[F.CORRUPT] and self._every != 1:
            context.note_inexact(Inexact.WAS_CORRUPT)
