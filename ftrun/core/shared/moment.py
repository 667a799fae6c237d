"""Describes a rank's place in its run for people: a part of a step, or a place between steps and loops. No decision reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftrun.core.amounts import place
from ftrun.core.shared.board import Busy, Cell, F, Phase, phase_name

# the parts of a run outside a step; they add to the names of a step's phases
CALL, CALL_AFTER, LOOP_END, AFTER_LOOP = "call", "call after loop", "loop end", "after loop"
_WITHOUT_STEP = {int(Phase.IDLE): CALL_AFTER, int(Phase.GATE): LOOP_END, int(Phase.DONE): AFTER_LOOP}

_AFTER = {CALL_AFTER: "in job.call after {}", LOOP_END: "at the end of {}", AFTER_LOOP: "after {}"}
_SHORT = {
    "start": "at its start, before {}",
    "idle": "before {}",
    "gate": "at the gate of {}",
    "done": "after the update of {}",
    CALL: "in job.call before {}",
}
_LONG = {
    "start": "while its script started, before {}",
    "idle": "before {} began",
    "forward": "in the forward pass of {}",
    "backward": "in the backward pass of {}",
    "gate": "at the gradient synchronization barrier of {}",
    "update": "in the optimizer step of {}",
    "done": "after the optimizer step of {}",
    CALL: "in the evaluation (job.call) before {}",
    CALL_AFTER: "in the evaluation (job.call) after {}",
}


def phase_of(cell: Cell) -> str:
    """Return the name of a worker's phase, or of its part of the run outside a step."""
    return phase_from(cell[F.PHASE], cell[F.BUSY], cell[F.STEP], cell[F.LOOP_END])


def phase_from(phase: int, busy: int, step: int, end: int) -> str:
    """Return `phase_of` a cell with these words on the board."""
    beyond = step > end > 0
    if busy & (Busy.CALL | Busy.AT_CALL_END):
        return CALL_AFTER if beyond else CALL
    return (_WITHOUT_STEP.get(phase) if beyond else None) or phase_name(phase)


@dataclass(frozen=True)
class Moment:
    """A rank's place in its run. `step`: its step, or after the loop the loop's number of steps; None before the first step.

    `epoch`: of job.epochs; `end`: steps of the loop, 0 = not known."""

    phase: str
    step: int | None
    epoch: int | None = None
    end: int = 0

    @classmethod
    def of(cls, cell: Cell) -> Moment:
        """Return the worker's current moment, or the moment of its death."""
        return cls(phase_of(cell), cell.step, cell.epoch, cell[F.LOOP_END])

    @classmethod
    def told(cls, facts: Mapping[str, Any]) -> Moment:
        """Return the moment that the journal recorded for a rank that failed."""
        return cls(str(facts.get("phase", "")), facts.get("step"), facts.get("epoch"), int(facts.get("end", 0)))

    @property
    def in_step(self) -> bool:
        """Is it in or before a step, not after the last step of a loop?"""
        return self.phase not in _AFTER

    @property
    def place(self) -> str:
        """Return the step in words: `step 60`, or `epoch 3, step 8 of 40`."""
        return place(self.step, self.epoch, self.end)

    @property
    def loop(self) -> str:
        return "the loop" if self.epoch is None else f"epoch {self.epoch}"

    @property
    def part(self) -> str:
        """Name the part of the run that all ranks do first after a repair."""
        return {CALL_AFTER: "job.call", LOOP_END: "end of the loop", AFTER_LOOP: "after the loop"}.get(
            self.phase, "first step"
        )

    def what(self) -> str:
        """Name the work at this moment: `step 60`, `job.call after epoch 3`."""
        if self.in_step:
            return self.place
        where = _AFTER[self.phase].format(self.loop)
        return f"what comes {where}" if self.phase == AFTER_LOOP else where.removeprefix("in ").removeprefix("at ")

    def words(self, long: bool = False) -> str:
        """Describe the moment: `in backward of step 60`, or `long`: `in the backward pass of step 60`; "" before the first step."""
        if self.step is None:
            return "while its script started" if long and self.phase == "start" else ""
        if not self.in_step:
            return ((_LONG.get(self.phase) if long else None) or _AFTER[self.phase]).format(self.loop)
        if not self.phase:
            return f"in {self.place}"
        return ((_LONG if long else _SHORT).get(self.phase) or f"in {self.phase} of {{}}").format(self.place)
