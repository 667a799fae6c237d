"""Finds ranks that are slower than the others, step after step, by robust statistics over each rank's own work in a step.

Stragglers are only reported: a slow rank costs time, taking it away costs more. One slow step says nothing; most of the
last `SAMPLES` must be slow, against the median of the other ranks in the same steps.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

SAMPLES = 30  # steps that count
RATIO = 1.8  # times as long as the others' median
USUAL = 1.4  # ... and in all but a fifth of the steps
LEAST = 0.010  # seconds a step that it must cost
CALM = 1.3  # below this it is no straggler any more


class Stragglers:
    """Takes every step that the launcher saw, and reports each episode once."""

    def __init__(self) -> None:
        self._steps: deque[Mapping[int, float]] = deque(maxlen=SAMPLES)  # seconds of work by rank
        self._reported: set[int] = set()
        self._step = -1
        self._uneven = 0  # steps in a row in which some ranks took much longer

    @property
    def curious(self) -> bool:
        """May the next steps reveal a straggler? Then the launcher must miss none of them."""
        return 0 < self._uneven <= SAMPLES and not self._reported

    def forget(self) -> None:
        """Drop all measurements, since the world changed."""
        self._steps.clear()
        self._reported.clear()
        self._uneven = 0

    def step(self, number: int, work: Mapping[int, float]) -> list[tuple[int, str]]:
        """Return the ranks to report after a step, with the evidence; `work`: seconds of each rank's own work in it."""
        if number == self._step or len(work) < 3 or min(work.values()) <= 0:
            return []  # with two ranks nobody can say which one is the odd one
        self._step = number
        self._steps.append(work)
        longest, shortest = max(work.values()), min(work.values())
        even = longest < USUAL * shortest or longest - shortest < LEAST
        self._uneven = 0 if even else self._uneven + 1
        if len(self._steps) < SAMPLES or (even and not self._reported):
            return []  # the usual case costs nothing
        return [(rank, evidence) for rank in work if (evidence := self._judge(rank))]

    def _judge(self, rank: int) -> str:
        """Return the evidence against a rank to report now; "" for any other."""
        samples = [_against_others(rank, work) for work in self._steps if rank in work]
        ratios = sorted(mine / others for mine, others in samples)
        median = statistics.median(ratios)
        if rank in self._reported:
            if median < CALM:
                self._reported.discard(rank)
            return ""
        mine, others = (statistics.median(s[i] for s in samples) for i in (0, 1))
        if median < RATIO or ratios[len(ratios) // 5] < USUAL or mine - others < LEAST:
            return ""
        self._reported.add(rank)
        return _evidence(median, mine, others)


def _against_others(rank: int, work: Mapping[int, float]) -> tuple[float, float]:
    """Return the seconds of its work, and of the others' median."""
    return work[rank], statistics.median(seconds for other, seconds in work.items() if other != rank)


def _evidence(ratio: float, mine: float, others: float) -> str:
    return (
        f"a straggler: its own part of a step takes {ratio:.1f} times as long as the others' "
        f"({mine * 1e3:.0f} ms against {others * 1e3:.0f} ms, medians of {SAMPLES} steps), and they wait for it"
    )
