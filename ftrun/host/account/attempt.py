"""What an attempt at the run has done so far: how many steps, and how long one took. For people; decides nothing."""

from __future__ import annotations

from collections import Counter


class Attempt:
    """From one start of all workers to the next. Steps are counted once every rank is protected: before, none is begun."""

    def __init__(self) -> None:
        self.since: int | None = None  # ns at which the first step could begin
        self.first = 0  # index of that step
        self.repairs_ms = 0.0  # since then
        self._loops: Counter[int] = (
            Counter()
        )  # cell -> loops that it ended, each of which passed a gate that is no step's

    def begin(self, now: int, first: int) -> None:
        self.since, self.first, self.repairs_ms = now, first, 0.0

    def loop_ended(self, cell: int) -> None:
        self._loops[cell] += 1

    def steps(self, gates: int) -> int:
        """How many of the first `gates` gates are those of steps."""
        return 0 if self.since is None else max(0, gates - max(self._loops.values(), default=0))

    def step_ms(self, gates: int, until: int) -> float:
        """What one of the steps before the first `gates` gates took, on the average, until the time `until` (ns)."""
        steps = self.steps(gates)
        if self.since is None or not steps:
            return 0.0
        return max(0.0, (until - self.since) / 1e6 - self.repairs_ms) / steps
