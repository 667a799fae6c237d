"""One budget for all occasional checks: it picks the bodies that are looked at as a whole.

Most of what a script may do behind ftrun's back it does from its first steps on, or never: it gives a parameter other memory, writes
weights before the gate, replaces buffers, freezes parameters. To look at all of it costs some microseconds a tensor. So the checks run
in the first bodies, in the first one after a repair, at the end of a loop, and in between as often as a share of the measured step
time pays for, at least in every 100th body. `ProtectedState.looking` tells the checks whether the present body is one of these.
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
    """Picks the bodies that are looked at.

    Attributes:
        bodies: How many began, this one included.
        step_ns: How long a step takes lately, ns; 0 = not known yet.

    Args:
        state: Its `looking` is set.
        words: Words of the rank's cell, from which people see which bodies were looked at.
        every: Bodies between two that are looked at; 0 = as often as the budget allows.
    """

    def __init__(self, state: ProtectedState, words: Any, every: int = 0) -> None:
        self.bodies = 0
        self.step_ns = 0
        self._state = state
        self._words = words
        self._every = every
        self._since = 0  # when this body was handed out, ns; 0 = not known, or something else than a step came between
        self._next = 0  # the next body to look at
        self._cost = 0  # ns that the looks of this body have taken
        self._others: list[tuple[StepObserver, tuple[str, ...]]] = []  # observer, events that it gets then

    def tell(self, other: StepObserver, *events: str) -> None:
        """Let `other`, one of the observers, receive these events only in bodies that are looked at."""
        self._others.append((other, events))

    def begins(self, number: int) -> None:
        """Decide, before the step of gate `number` is handed out, whether its body is looked at."""
        now, since = time.monotonic_ns(), self._since
        self._since = now
        if since and self._state.looking:
            length = now - since - self._cost
            self.step_ns = min(self.step_ns or length, length)  # the first ones compile, and fill caches
            # count the excess over other bodies, too: not every extra work is measured by itself
            self._next = self.bodies + self._distance(max(self._cost, now - since - self.step_ns))
        elif since:
            # a single body may take long for a reason of its own, such as a checkpoint
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
        """Count the cost of a look that began at `since`, ns, and ends now."""
        self._cost += time.monotonic_ns() - since

    def loop_ending(self, number: int) -> None:
        self._again()

    def aborted(self, raised: bool) -> None:
        self._again()

    def replaced(self) -> None:
        self._again()

    def _again(self) -> None:
        """Look at the next body, and do not take the time until then for a step's."""
        self._since = self._next = 0
        if not self._state.looking:
            self._turn(True)
