"""Detect parameters and optimizer state that change where no hook sees it: before a gate, or between two bodies."""

from __future__ import annotations

import time
from typing import Any

from ftrun.core.errors import UsageError, WorkerError
from ftrun.worker.link.observer import StepObserver
from ftrun.worker.link.position import Position
from ftrun.worker.state.looks import FIRST, Looks
from ftrun.worker.state.protected_state import ProtectedState
from ftrun.worker.step.replica_check import ReplicaCheck

_WRITTEN = (
    "parameters or optimizer state changed between the start of the step and its gate: they were written by something "
    "that ftrun cannot see (an optimizer inside backward, a CUDA graph, .data); change them in the body, after optimizer.step()"
)
_MAYBE = (
    "parameters or optimizer state changed between the start of the step and its gate, which failing memory does and a script may do, "
    "too; the step is done again and the replicas are compared: whoever differs is replaced, and a script that does it again is told"
)


class HiddenWrites(StepObserver):
    """Compares checksums at the start of a body, at its gate, at its end and at the next hand-out, in the bodies that `Looks` picks.

    A script that writes where it must not does so in its first steps. Later, a bit that failing memory flips looks the same on one
    rank: the comparison of replicas tells them apart, at this gate, if it is due there, or in the step that is done again.
    """

    def __init__(self, position: Position, state: ProtectedState, looks: Looks, replicas: ReplicaCheck) -> None:
        self._position = position
        self._state = state
        self._looks = looks
        self._replicas = replicas
        self._before = 0  # checksum at the start of the body
        self._calls = 0  # of models in this body
        self._after: int | None = None  # checksum at its end
        self._writes: list[int] = []  # counts of writes to the parameters, at the start of the body
        self._suspect = False  # the state had changed at a gate that also compares the replicas

    def _mark(self) -> int:
        since = time.monotonic_ns()
        mark = self._state.checksum()
        self._looks.spent(since)
        return mark

    def loop_started(self, first: int, length: int) -> None:
        """Forget the last checksum: a replacement runs the code between two loops, too, so anything may change there."""
        self._after = None

    def handed_out(self, number: int) -> None:
        """Compare with the end of the last body. Raises UsageError for a change, or if all replicas changed before the last gate."""
        suspect, self._suspect = self._suspect, False
        if suspect and not self._state.holders.differ():  # all replicas were equal: each of them did it
            raise UsageError(_WRITTEN, explain="F308")
        after, self._after = self._after, None
        if after is not None and self._position.attempt == 0 and after != self._mark():
            raise UsageError(
                "parameters or optimizer state changed between two bodies: change them inside `with step:`, after the update",
                explain="F307",
            )

    def body_started(self) -> None:
        self._calls = 0
        self._before = self._mark()
        # a read of GPU memory would wait for the backward, which may wait for a dead peer: count writes there
        self._writes = self._state.writes_to_params() if self._state.gpu is not None else []

    def model_called(self, args: Any, kwargs: Any) -> None:
        """Refuse weights that move for a second forward and back again: the gate does not see that, nor does a redone step undo it.

        Raises:
            UsageError: If they moved.
        """
        self._calls += 1
        if self._calls == 1:
            return
        moved = self._state.writes_to_params() != self._writes if self._state.gpu is not None else self._mark() != self._before
        if moved:
            raise UsageError(
                "parameters were moved between two forwards of one step, before optimizer.step() (sharpness-aware minimization?): a "
                "repeated step would begin where they were moved to. Make it two steps, each with a backward and one "
                "step() of a protected optimizer: the first moves the parameters, the second brings them back and updates",
                explain="F396",
            )

    def gate_reached(self, number: int, optimizer: Any, grads: list[Any]) -> None:
        """Compare with the start of the body. Raises UsageError, or WorkerError (do the step again) if memory may have failed."""
        self._state.check_places()
        # the device is done: an earlier read could wait for a collective with a dead peer, and nothing would wake it
        if self._before == self._mark():
            return
        if number < FIRST or self._position.attempt > 0 or len(self._state.holders.comparable()) < 2:
            raise UsageError(_WRITTEN, explain="F308")
        if not self._replicas.due(number):
            raise WorkerError(_MAYBE)
        self._suspect = True

    def step_done(self, number: int) -> None:
        """Raises UsageError if a parameter was given other memory."""
        self._state.check_places()
        self._after = self._mark()

    def loop_ending(self, number: int) -> None:
        """Check the parameters' memory, since the last bodies may have had no look.

        Raises:
            UsageError: If a parameter was given other memory.
        """
        self._state.check_places()

    def aborted(self, raised: bool) -> None:
        self._after, self._suspect = None, False
