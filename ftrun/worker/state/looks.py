"""One budget for everything that is looked at only now and then: which bodies are looked at as a whole.

Most of what a script may do behind ftrun's back it does from its first steps on, or never: memory that it gives to a parameter,
weights that it writes before the gate, buffers that it replaces, parameters that it freezes. To look at all of it costs some
microseconds a tensor. So that is done in the first bodies, in the first one after a repair, at the end of a loop, and in between as
often as a share of the measured step time pays for, at least in every 100th body. `ProtectedState.looking` says it of the body that
runs, to whoever looks.
"""

from __future__ import annotations

import math
import time
from typing import Any

from ftrun.core.shared.board import F
from ftrun.worker.link.observer import StepObserver
from ftrun.worker.state.protected_state import ProtectedState

SHARE = 0.005  # of the time of a step
FIRST = 3  # bodies
_MOST = 100  # bodies between two that are looked at


class Looks(StepObserver):
    """Attributes:
    bodies: How many began, this one among them.
    step_ns: How long a step takes lately, ns; 0 = not known yet.

    Args:
        state: Is told.
        words: Of the rank's cell, where people see what was looked at.
        every: Bodies between two that are looked at; 0 = as often as the budget allows.
    """

    def __init__(self, state: ProtectedState, words: Any, every: int = 0) -> None:
        self.bodies = 0
        self.step_ns = 0
        self._state = state
        self._words = words
        self._every = every
        self._since = 0  # when this body was handed out, ns; 0 = not known, or something else than a step came between
        self._next = 0  # the body that is looked at next
        self._cost = 0  # ns that the looks of this body have taken
        self._others: list[tuple[StepObserver, tuple[str, ...]]] = []  # and what they hear in a body that is looked at

    def tell(self, other: StepObserver, *events: str) -> None:
        """Have `other`, which is one of the observers, hear these events in bodies that are looked at, and in no others."""
        self._others.append((other, events))

    def begins(self, number: int) -> None:
        """The step of gate `number` is about to be handed out: is its body looked at?"""
        now, since = time.monotonic_ns(), self._since
        self._since = now
        if since and self._state.looking:
            length = now - since - self._cost
            self.step_ns = min(self.step_ns or length, length)  # the first ones compile, and fill caches
            # what it took longer than others do: not all that is done once more is measured by itself
            self._next = self.bodies + self._distance(max(self._cost, now - since - self.step_ns))
        elif since:
            # one may be long for a reason of its own, such as a checkpoint
            self.step_ns = min(2 * self.step_ns, (self.step_ns + now - since) // 2)
        self.bodies += 1
        self._cost = 0
        looking = self.bodies <= FIRST or self.bodies >= self._next
        if looking is not self._state.looking:
            self._turn(looking)
        if looking:
            self._words[F.LOOKS] += 1
            self._words[F.LOOKED_AT] = number + 1

    def _distance(self, cost: int) -> int:
        if self._every:
            return self._every
        return min(_MOST, max(1, math.ceil(cost / (SHARE * max(self.step_ns, 1)))))

    def _turn(self, looking: bool) -> None:
        self._state.looking = looking
        change = self.told_by.listen if looking else self.told_by.ignore
        for other, events in self._others:
            for event in events:
                change(event, other)

    def spent(self, since: int) -> None:
        """A look of this body began at `since`, ns, and is over."""
        self._cost += time.monotonic_ns() - since

    def loop_ending(self, number: int) -> None:
        self._again()

    def aborted(self, raised: bool) -> None:
        self._again()

    def replaced(self) -> None:
        self._again()

    def _again(self) -> None:
        """What comes next is looked at; how long it is until then says nothing of a step."""
        self._since = self._next = 0
        if not self._state.looking:
            self._turn(True)
