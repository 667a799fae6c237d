"""Map times to positions on an axis whose sections have scales of their own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A piecewise linear map from `times[k]` to `places[k]`."""

    times: tuple[float, ...]
    places: tuple[float, ...]

    def at(self, time: float) -> float:
        """Return the place of a time, clamped to the ends of the axis."""
        for k in range(len(self.times) - 1):
            begin, end = self.times[k], self.times[k + 1]
            if time <= end or k == len(self.times) - 2:
                part = (time - begin) / (end - begin) if end > begin else 0.0
                return self.places[k] + max(0.0, min(1.0, part)) * (self.places[k + 1] - self.places[k])
        return self.places[-1]
