"""One budget for everything that is looked at only now and then: which bodies are looked at as a whole.

Most of what a script may do behind ftrun's back it does from its first steps on, or never: memory that it gives to a parameter,
weights that it writes before the gate, buffers that it replaces, parameters that it freezes. To look at all of it costs some
microseconds a tensor. So that is done in the first bodies, in the first one after a repair, at the end of a loop, and in between as
often as a share of the measured step time pays for, at least in every 100th body.
"""

from __future__ import annotations

import math
import time
from typing import Any

from ftrun.core.shared.board import F
from ftrun.worker.runtime.observer import Observers, StepObserver
from ftrun.worker.state.protected_state import ProtectedState

SHARE = 0.005  # of the time of a step
_FIRST = 3  # bodies
_MOST = 100  # bodies between two that are looked at


class Looks(StepObserver):
    """Attributes:
    on: Is this body looked at?
    bodies: How many began, this one among them.
    step_ns: How long a step takes lately, ns; 0 = not known yet.

    Args:
        state: Is told as well.
        every: Bodies between two that are looked at; 0 = as often as the budget allows.
        words: Of the rank's cell, where people see what was looked at.
    """

    def __init__(self, state: ProtectedState, every: int = 0, words: Any = None) -> None:
        self._words = {F.LOOKS: 0} if words is None else words
        self.on = True
        self.bodies = 0
        self.step_ns = 0
        self._state = state
        self._every = every
        self._since = 0  # when this body was handed out, ns
        self._next = 0  # the body that is looked at next
        self._cost = 0  # ns that the looks of this body have taken
        self._observers = Observers()
        self._others: list[tuple[StepObserver, tuple[str, ...]]] = []  # and what they hear in a body that is looked at

    def tell(self, observers: Observers, other: StepObserver, *events: str) -> None:
        """Have `other`, which is one of the observers, hear these events in bodies that are looked at, and in no others."""
        self._observers = observers
        self._others.append((other, events))

    def _turn(self, on: bool) -> None:
        self._state.looking = self.on = on
        change = self._observers.listen if on else self._observers.ignore
        for other, events in self._others:
            for event in events:
                change(event, other)

    def begins(self, number: int) -> None:
        """The step of gate `number` is about to be handed out: is its body looked at?"""
        now, since = time.monotonic_ns(), self._since
        self._since = now
        if since and self.on:
            length = now - since - self._cost
            self.step_ns = min(self.step_ns or length, length)  # the first ones compile, and fill caches
            # what it took longer than others do: not all that is done once more is measured by itself
            self._next = self.bodies + self._distance(max(self._cost, now - since - self.step_ns))
        elif since:
            # one may be long for a reason of its own, such as a checkpoint
            self.step_ns = min(2 * self.step_ns, (self.step_ns + now - since) // 2)
        self.bodies += 1
        self._cost = 0
        on = self.bodies <= _FIRST or self.bodies >= self._next
        if on is not self.on:
            self._turn(on)
        if on:
            self._words[F.LOOKS] += 1
            self._words[F.LOOKED_AT] = number + 1

    def _distance(self, cost: int) -> int:
        if self._every:
            return self._every
        return min(_MOST, max(1, math.ceil(cost / (SHARE * max(self.step_ns, 1)))))

    def spent(self, since: int) -> None:
        """A look of this body began at `since`, ns, and is over."""
        self._cost += time.monotonic_ns() - since

    def loop_ending(self, number: int) -> None:
        self._now()

    def aborted(self, raised: bool) -> None:
        self._now()

    def replaced(self) -> None:
        self._now()

    def _now(self) -> None:
        """What comes next is looked at."""
        self._next = 0
        if not self.on:
            self._turn(True)
