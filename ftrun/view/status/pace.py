"""Compute a run's pace from the opening times of its newest gates. Pure: no clock, no file. Times in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_RECENT = 10.0  # seconds over which the rate is averaged; a single longer step is taken whole
_LATE = 3.0  # typical steps without a gate after which there is no ETA


@dataclass(frozen=True)
class Pace:
    """The pace of a run.

    `times`: seconds of the newest steps, oldest first, with any repair in them. `age`: seconds since the last gate opened,
    None before the first.
    """

    times: tuple[float, ...] = ()
    age: float | None = None

    @classmethod
    def of(cls, opened: Sequence[int], now: int) -> Pace:
        """Compute the pace from the opening times of consecutive gates, in ns."""
        times = tuple(round(max(0, b - a) / 1e9, 6) for a, b in pairwise(opened))
        return cls(times, max(0, now - opened[-1]) / 1e9 if opened else None)

    @property
    def typical(self) -> float | None:
        """Return the median step time in seconds."""
        return statistics.median(self.times) if self.times else None

    @property
    def rate(self) -> float | None:
        """Return the steps per second; the rate falls while the next gate is late, to one step in that time at most."""
        taken, steps = 0.0, 0
        for time in reversed(self.times):
            if steps and taken + time > _RECENT:
                break
            taken, steps = taken + time, steps + 1
        if not steps or taken <= 0 or self.age is None:
            return None
        return min(steps / taken, 1 / self.age) if self.age > 0 else steps / taken

    def left(self, steps: int) -> float | None:
        """Return the seconds that `steps` more steps will take; None without a typical step or with a late one."""
        typical = self.typical
        if typical is None or self.age is None or self.age > _LATE * typical + 1.0 or steps <= 0:
            return None
        return max(0.0, steps * typical - self.age)
