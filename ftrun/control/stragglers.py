"""Ranks that are slower than the others, step after step: robust statistics over each rank's own share of a step's time.

A report and nothing more: a slow rank costs time, taking it away costs more. One slow step says nothing; most of the last
`SAMPLES` must be slow, against the median of the other ranks in the same steps.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

SAMPLES = 30  # steps looked at
RATIO = 1.8  # times as long as the others, in the median
USUAL = 1.4  # ... and in all but a fifth of the steps
LEAST = 0.010  # seconds a step must be lost by it
CALM = 1.3  # below this it is no straggler any more


class Stragglers:
    """Feed it with every step that was seen; it tells each episode once."""

    def __init__(self) -> None:
        self._ratios: dict[int, deque[tuple[float, float, float]]] = {}
        self._reported: set[int] = set()
        self._step = -1

    def forget(self) -> None:
        """The world changed: what was measured before says nothing about it."""
        self._ratios.clear()
        self._reported.clear()

    def step(self, number: int, work: Mapping[int, float]) -> list[tuple[int, str]]:
        """Ranks to report, with the evidence, after a step; `work`: seconds of own work of each rank in it."""
        if number == self._step or len(work) < 3 or min(work.values()) <= 0:
            return []  # of two ranks nobody can say which one is the odd one
        self._step = number
        found = []
        for rank, mine in work.items():
            others = statistics.median(v for r, v in work.items() if r != rank)
            samples = self._ratios.setdefault(rank, deque(maxlen=SAMPLES))
            samples.append((mine / others, mine, others))
            reported = rank in self._reported
            if len(samples) < SAMPLES or (mine / others >= CALM if reported else mine / others < USUAL):
                continue  # this step changes nothing: the usual case costs nothing
            ratios = sorted(s[0] for s in samples)
            median = statistics.median(ratios)
            if reported:
                if median < CALM:
                    self._reported.discard(rank)
                continue
            mine, others = (statistics.median(s[i] for s in samples) for i in (1, 2))
            if median >= RATIO and ratios[SAMPLES // 5] >= USUAL and mine - others >= LEAST:
                self._reported.add(rank)
                found.append((rank, _evidence(median, mine, others)))
        return found


def _evidence(ratio: float, mine: float, others: float) -> str:
    return (
        f"a straggler: its own part of a step takes {ratio:.1f} times as long as the others' "
        f"({mine * 1e3:.0f} ms against {others * 1e3:.0f} ms, medians of {SAMPLES} steps), and they wait for it"
    )
