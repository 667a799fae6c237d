"""Parameters and optimizer state that change where nothing of ftrun sees it: before a gate, or between two bodies."""

from __future__ import annotations

from typing import Any

from ftrun.core.errors import UsageError
from ftrun.worker.runtime.observer import StepObserver
from ftrun.worker.runtime.position import Position
from ftrun.worker.state.protected_state import ProtectedState

_GUARDED = 3  # first steps in which all parameters are looked at; then every 100th. In between a sample is


class HiddenWrites(StepObserver):
    """Compares checksums at the start of a body, at its gate, at its end and at the next hand-out. Errors: UsageError."""

    def __init__(self, position: Position, state: ProtectedState) -> None:
        self._position = position
        self._state = state
        self._bodies = 0
        self._before = (0, 0)  # at the start of the body
        self._after: tuple[int, int] | None = None  # and at its end

    def _mark(self) -> tuple[int, int]:
        looking = self._bodies <= _GUARDED or self._bodies % 100 == 0
        return self._state.params_checksum() if looking else 0, self._state.sample(self._bodies)

    def loop_started(self, first: int, length: int) -> None:
        """What is between two loops is run by a replacement too, so anything may change there."""
        self._after = None

    def handed_out(self, number: int) -> None:
        after, self._after = self._after, None
        if after is not None and self._position.attempt == 0 and after != self._mark():
            raise UsageError(
                "parameters or optimizer state changed between two bodies: change them inside `with step:`, after the update"
            )

    def body_started(self) -> None:
        self._bodies += 1
        self._before = self._mark()

    def gate_reached(self, number: int, optimizer: Any, grads: list[Any]) -> None:
        self._state.check_places()
        # the device is done: reading before would wait for a collective that waits for a dead peer, and not wake
        if self._before != self._mark():
            raise UsageError(
                "parameters or optimizer state changed between the start of the step and its gate: they were written by something "
                "that ftrun cannot see (an optimizer inside backward, a CUDA graph, .data); change them after optimizer.step()"
            )

    def step_done(self, number: int) -> None:
        self._state.check_places()
        self._after = self._mark()

    def aborted(self, raised: bool) -> None:
        self._after = None
