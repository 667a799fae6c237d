"""Detects processes whose beat stopped, and accuses those that are stopped or frozen, but none that a debugger holds.

Theory of operation. A worker's beat comes from a native thread, so it stops only when no thread of the process runs; a helper beats by
answering. An overdue beat only makes the watch look at the process in /proc: stopped or frozen in two looks, it is accused;
without a visible reason, only after its timeout. Time in which a late launcher or a paused machine did not look is no silence.

The next look comes when the newest beat would be overdue. Workers beat together (see native/src/process/beat.cpp), so that one look
in each interval finds all workers that missed the last beat.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ftrun.core.system.cgroup import group_files
from ftrun.core.system.procfs import status

Of = TypeVar("Of", bound=Hashable)
LOOKS = 4  # looks in one interval while a process is under suspicion
_OVERDUE = 1.1  # intervals; an older beat is overdue
_LOOK = 1.15  # intervals from the newest beat to the next look
_REMEMBERED = 600.0  # seconds for which a late look counts


@dataclass(frozen=True)
class Beat(Generic[Of]):
    """The last sign of life of a process. `of` names the process; `at` in monotonic ns; `timeout` in seconds, which `option` sets."""

    of: Of
    pid: int
    at: int
    timeout: float
    option: str = ""


class BeatWatch(Generic[Of]):
    """Watches the beats of processes. `interval`: seconds between two beats."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._suspected: set[Of] = set()  # stopped or frozen at the last look
        self._held: dict[Of, int] = {}  # time (ns) of the last look at which a debugger held it
        self._late: list[tuple[int, float]] = []  # late looks: their time (ns) and delay (seconds)
        self._due = time.monotonic() + self.longest  # monotonic time of the next look, in seconds

    @property
    def longest(self) -> float:
        """The longest time between two looks, in seconds."""
        return _LOOK * self._interval

    @property
    def pause(self) -> float:
        """Seconds until the next look is due."""
        return max(0.0, self._due - time.monotonic())

    def silent(self, beats: Iterable[Beat[Of]], now_ns: int) -> list[tuple[Of, str]]:
        """Return the processes to condemn, each with the evidence. Call again after `pause` seconds; the watch allows for late calls.

        A process without a visible reason for its silence is returned after its timeout. `now_ns`: monotonic time in ns.
        """
        now = time.monotonic()
        late = now - self._due - self._interval / LOOKS
        newest = 0
        self._late = [one for one in self._late if now_ns - one[0] < _REMEMBERED * 1e9]
        if late > 0:
            self._late.append((now_ns, late))
        found: list[tuple[Of, str]] = []
        suspected: set[Of] = set()
        for beat in beats:
            newest = max(newest, beat.at)
            if self._silence(beat.at, now_ns) <= _OVERDUE * self._interval:
                continue
            if traced(beat.pid):
                self._held[beat.of] = now_ns
                continue
            # after its debugger lets go, the process needs a moment to beat
            silence = self._silence(max(beat.at, self._held.get(beat.of, 0)), now_ns)
            why = why_still(beat.pid)
            if why and beat.of in self._suspected:
                found.append((beat.of, f"no beat for {(now_ns - beat.at) / 1e9:.2f} s: {why}"))
            elif why:
                suspected.add(beat.of)  # a machine that wakes up does not wake all of its processes at once
            elif silence > beat.timeout:
                found.append((beat.of, f"no beat for {silence:.1f} s{beat.option and f' ({beat.option})'}, and no reason to be seen"))
        self._suspected = suspected
        to_see = 0.0 if suspected else (newest / 1e9 or now) + self.longest - now
        self._due = now + min(max(self._interval / LOOKS, to_see), self.longest)
        return found

    def _silence(self, since: int, now_ns: int) -> float:
        """Return the seconds of silence, less the delays of late looks."""
        return (now_ns - since) / 1e9 - sum(late for when, late in self._late if when > since)


def why_still(pid: int) -> str:
    """Return the reason why a process does not run, as the end of a sentence; "" without a reason, or when a debugger holds it."""
    fields = status(pid)
    if not fields or fields.get("TracerPid", "0") != "0":
        return ""
    if fields.get("State", "").startswith("T"):
        return "the process is stopped by a signal and no debugger holds it"
    frozen = _frozen_cgroup(pid)
    return f"its cgroup is frozen ({frozen})" if frozen else ""


def traced(pid: int) -> bool:
    """Does a debugger or a profiler hold the process?"""
    return status(pid).get("TracerPid", "0") != "0"


def _frozen_cgroup(pid: int) -> str:
    """Return the frozen freezer (v1) or cgroup (v2) of `pid`; "" when there is none."""
    for path in group_files(pid, "freezer", "freezer.state", "cgroup.events"):
        with contextlib.suppress(OSError):
            if re.search("^(FROZEN|frozen 1)$", path.read_text(), re.MULTILINE):
                return str(path.parent)
    return ""
