"""Counts the steps of an attempt at the run, and measures how long one took. For people; decides nothing."""

from __future__ import annotations


class Attempt:
    """The time from one start of all workers to the next. Counting begins once every rank is protected: no step begins before."""

    def __init__(self) -> None:
        self.since: int | None = None  # ns at which the first step could begin
        self.first = 0  # index of that step
        self.repairs_ms = 0.0  # since then

    def begin(self, now: int, first: int) -> None:
        self.since, self.first, self.repairs_ms = now, first, 0.0

    def steps(self, gates: int, ends: int) -> int:
        """Count the steps among the first `gates` gates; `ends`: loops and calls that ended, each at a gate of its own."""
        return 0 if self.since is None else max(0, gates - ends)

    def step_ms(self, gates: int, ends: int, until: int) -> float:
        """Return the average ms of a step among the first `gates` gates until `until` (ns), without the time of repairs."""
        steps = self.steps(gates, ends)
        if self.since is None or not steps:
            return 0.0
        return max(0.0, (until - self.since) / 1e6 - self.repairs_ms) / steps
