"""Judges whether a repair stands still, from the progress of the ranks that it waits for.

A repair may take long, since a state may be large and a script may load much first; so the limit is on the time without
progress, of which there are two kinds. A sign on the board (a stage, a phase, a collective, bytes that were moved) is certain.
Work of the rank's processes (processor time, bytes read) is a hint: a script that reads its data shows no more, and neither does
an endless loop. Without both a replacement waits for something that does not come, most often for the other ranks, which are
long past that line of the script: it gets little time. So does a survivor that repairs. One that is still in the script's own
code between two steps may write a checkpoint there: it gets as much time as a busy rank.

Time is counted from look to look, and a late look counts as one in time. No clock, no I/O, no torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

QUIET = 30.0  # seconds that a replacement may neither work nor show a sign
START_TIMES = 2.0  # a replacement gets at least this many times the longest start of a rank in this run
BUSY = 0.02  # share of one processor: the least that counts as work
TOLD = 10.0  # seconds of waiting after which people are told first; then after twice as long, and so on
PAUSE = 1.0  # seconds between two looks
_LONGEST = 3 * PAUSE  # a look later than that counts as one in time


@dataclass(frozen=True)
class Awaited:
    """A worker that the repair waits for. `mark` changes with every sign on the board, `work` grows while it is busy (seconds).

    `patient`: it is a survivor in the script's own code.
    """

    cell: int
    mark: tuple[int, ...]
    work: float
    patient: bool = False


@dataclass(frozen=True)
class Wait:
    """The repair has awaited a worker for `waited` seconds, the last `still` of them without progress; more than `limit` is too much."""

    cell: int
    waited: float
    still: float
    limit: float

    @property
    def over(self) -> bool:
        return self.still >= self.limit


@dataclass
class _Seen:
    mark: tuple[int, ...]
    work: float
    first: float
    sign: float
    busy: float


class Stalls:
    """One per run. `timeout`: --recover-timeout, seconds."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._seen: dict[int, _Seen] = {}
        self._generation = -1
        self._at: float | None = None
        self._clock = 0.0
        self._tell_at = 0.0  # seconds; 0 = nothing was told yet

    def due(self, now: float, generation: int) -> bool:
        """Is it time for a look? Not in the first second of a repair, since most take less."""
        if generation != self._generation:
            self._generation, self._at = generation, now
            self._seen, self._clock, self._tell_at = {}, 0.0, 0.0
        return self._at is not None and now - self._at >= PAUSE

    def look(self, now: float, waited_for: Sequence[Awaited], start: float) -> list[Wait]:
        """Measure the wait for each worker. `start`: seconds that the longest start of a rank took, 0 = not known."""
        passed = 0.0 if self._at is None else min(now - self._at, _LONGEST)
        self._at = now
        self._clock += passed
        clock = self._clock
        waits = []
        for one in waited_for:
            seen = self._seen.setdefault(one.cell, _Seen(one.mark, one.work, clock, clock, clock))
            if one.mark != seen.mark:
                seen.mark, seen.sign, seen.busy = one.mark, clock, clock
            if one.work - seen.work > BUSY * passed:
                seen.busy = clock
            seen.work = one.work
            waits.append(Wait(one.cell, clock - seen.first, *self._still(one, clock - seen.busy, clock - seen.sign, start)))
        for cell in self._seen.keys() - {one.cell for one in waited_for}:
            del self._seen[cell]
        return waits

    def _still(self, one: Awaited, quiet: float, silent: float, start: float) -> tuple[float, float]:
        """Return the seconds without progress and their limit, for the kind of progress that reaches its limit sooner."""
        least = START_TIMES * start
        busy = max(self._timeout, least)
        idle = busy if one.patient else max(min(QUIET, self._timeout), least)
        return (quiet, idle) if idle - quiet <= busy - silent else (silent, busy)

    def to_tell(self, waits: Sequence[Wait]) -> bool:
        """Should people be told of them now? First after TOLD or half the limit, then each time that the wait has doubled."""
        waited = max((w.waited for w in waits), default=0.0)
        due = self._tell_at or min((TOLD, *(w.limit / 2 for w in waits)))
        if not waits or waited < due:
            return False
        self._tell_at = 2 * waited
        return True
