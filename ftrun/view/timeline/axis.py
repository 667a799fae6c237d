"""Where a time is drawn, on an axis whose sections have scales of their own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """`times[k]` is drawn at `places[k]`; straight between."""

    times: tuple[float, ...]
    places: tuple[float, ...]

    def at(self, time: float) -> float:
        """The place of a time; times outside are drawn at the ends."""
        for k in range(len(self.times) - 1):
            begin, end = self.times[k], self.times[k + 1]
            if time <= end or k == len(self.times) - 2:
                part = (time - begin) / (end - begin) if end > begin else 0.0
                return self.places[k] + max(0.0, min(1.0, part)) * (self.places[k + 1] - self.places[k])
        return self.places[-1]
