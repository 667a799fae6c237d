"""How fast a run steps, from when its newest gates opened. Pure: no clock, no file. Times in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_RECENT = 10.0  # seconds that a rate is taken of, or the last step, when that took longer
_LATE = 3.0  # typical steps without a gate after which nobody can say how long the rest will take


@dataclass(frozen=True)
class Pace:
    """`times` of the newest steps, oldest first, each with whatever happened in it; `age` of the last gate, None before it opened."""

    times: tuple[float, ...] = ()
    age: float | None = None

    @classmethod
    def of(cls, opened: Sequence[int], now: int) -> Pace:
        """From the times at which consecutive gates opened, in ns."""
        times = tuple(round(max(0, b - a) / 1e9, 6) for a, b in pairwise(opened))
        return cls(times, max(0, now - opened[-1]) / 1e9 if opened else None)

    @property
    def typical(self) -> float | None:
        """Seconds of a typical step."""
        return statistics.median(self.times) if self.times else None

    @property
    def rate(self) -> float | None:
        """Steps in a second. It falls while the next gate does not open: one step in that time would be the best that is left."""
        taken, steps = 0.0, 0
        for time in reversed(self.times):
            if steps and taken + time > _RECENT:
                break
            taken, steps = taken + time, steps + 1
        if not steps or taken <= 0 or self.age is None:
            return None
        return min(steps / taken, 1 / self.age) if self.age > 0 else steps / taken

    def left(self, steps: int) -> float | None:
        """Seconds that so many steps will take; None when that cannot be told."""
        typical = self.typical
        if typical is None or self.age is None or self.age > _LATE * typical + 1.0 or steps <= 0:
            return None
        return max(0.0, steps * typical - self.age)
