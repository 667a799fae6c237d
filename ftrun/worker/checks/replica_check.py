"""Are the replicas' weights and optimizer state still equal? Their checksums meet on the board, before a gate opens."""

from __future__ import annotations

from typing import Any

from ftrun.core.shared.board import F, Inexact, sum_of, sum_word
from ftrun.core.shared.replicas import corrupt
from ftrun.worker.runtime.observer import StepObserver
from ftrun.worker.runtime.run_link import Context
from ftrun.worker.state.protected_state import ProtectedState

_FIRST_CHECKS = 2  # the first gates, at which it is learned whether ranks are replicas


class ReplicaCheck(StepObserver):
    """Compares every `every` steps, 0 = never."""

    def __init__(self, context: Context, state: ProtectedState, every: int) -> None:
        self._context = context
        self._state = state
        self._every = every
        self._trusted = False  # all replicas were equal when last compared
        self._checking = -1  # gate at which replicas are compared
        self._agreed = -1  # the last one at which they may go on

    def gate_reached(self, number: int, optimizer: Any, grads: list[Any]) -> None:
        """Publish this rank's checksum, when it is time."""
        self._checking = -1
        world, cell = self._context.world, self._context.cell
        if not self._every or world is None or world.size < 2 or (number >= _FIRST_CHECKS and number % self._every):
            return
        value = self._sum()
        if value is None:
            return
        self._trusted = self._trusted or self._others_trust()
        cell[F.SUM_AT] = 0
        cell[F.SUM] = value
        cell[F.SUM_AT] = sum_word(number, self._trusted)
        self._checking = number

    def _sum(self) -> int | None:
        """Checksum of what every replica must have bit for bit; None when nothing is replicated."""
        value, found = 0, False
        for entry in self._state.replicated(self._state.manifest):
            value = self._state.arena.checksum(entry, value)
            found = True
        return value if found else None

    def may_open(self, number: int) -> bool:
        """False: the launcher must first replace a rank whose weights are corrupt."""
        if self._checking != number or self._agreed == number:
            return True
        assert self._context.world is not None
        cells = self._context.cells()
        words = [sum_of(c[F.SUM_AT]) for c in cells]
        sums = [c[F.SUM] for c in cells]
        if any(at != number for at, _ in words):
            self._agreed = number
            return True  # a rank that replicates nothing, or compares at other steps
        if corrupt(sums, [trusted for _, trusted in words]):
            return False
        self._trusted = len(set(sums)) == 1
        self._agreed = number
        return True

    def _others_trust(self) -> bool:
        """One rank opens each gate, and it alone needs to have compared: the others learn it from its word."""
        context = self._context
        assert context.world is not None
        return any(sum_of(context.board.cell(p.cell)[F.SUM_AT])[1] for p in context.world.places)

    def replaced(self) -> None:
        """What the predecessor spoilt when it was corrupt is not known."""
        context = self._context
        assert context.world is not None
        lost = (context.world.lost or {}).get(str(context.rank))
        if lost is not None and context.board.cell(lost)[F.CORRUPT] and self._every != 1:
            context.note_inexact(Inexact.WAS_CORRUPT)
