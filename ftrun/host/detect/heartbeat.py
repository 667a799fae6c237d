"""Processes whose beat stopped: one that is stopped or frozen is condemned, one that a debugger holds is not.

A worker's beat comes from a native thread, so it stops only when no thread of the process runs; one of our helpers beats by
answering. An overdue beat is a reason to look at the process, nothing more: what a late launcher or a paused machine missed
is not the silence of others.

There is no look before there is something to see: the next one comes when the newest beat would be overdue. Workers beat together (see
native/src/process/beat.cpp), so that one look in an interval finds every worker that left the last beat out.
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
LOOKS = 4  # looks in one interval once there is something to find out
_OVERDUE = 1.1  # intervals: a beat that is later than this is looked into
_LOOK = 1.15  # intervals from the newest beat to the next look
_REMEMBERED = 600.0  # seconds for which a late look is counted


@dataclass(frozen=True)
class Beat(Generic[Of]):
    """The last sign of life of a process. `of` names whose it is; `at` in ns; `timeout` in seconds, `option`: what sets it."""

    of: Of
    pid: int
    at: int
    timeout: float
    option: str = ""


class BeatWatch(Generic[Of]):
    """`interval`: seconds between two beats."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._suspected: set[Of] = set()  # found stopped at the last look
        self._held: dict[Of, int] = {}  # when a debugger was last seen to hold it, ns
        self._late: list[tuple[int, float]] = []  # looks that came late: when (ns), and by how many seconds
        self._due = time.monotonic() + self.longest  # when the next look was to come

    @property
    def longest(self) -> float:
        """Seconds between two looks, at most."""
        return _LOOK * self._interval

    @property
    def pause(self) -> float:
        """Seconds until the next look is due."""
        return max(0.0, self._due - time.monotonic())

    def silent(self, beats: Iterable[Beat[Of]], now_ns: int) -> list[tuple[Of, str]]:
        """The workers to condemn, each with the evidence. Call it again after `pause` seconds; being late is noticed here.

        A beat whose timeout passes without any visible reason counts as well.
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
            # let go by its debugger, it needs a moment to beat
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
        """Seconds of silence, without those in which nobody looked."""
        return (now_ns - since) / 1e9 - sum(late for when, late in self._late if when > since)


def why_still(pid: int) -> str:
    """The reason that keeps a process from running, as a sentence's end; "" when nothing does or a debugger holds it."""
    fields = status(pid)
    if not fields or fields.get("TracerPid", "0") != "0":
        return ""
    if fields.get("State", "").startswith("T"):
        return "the process is stopped by a signal and no debugger holds it"
    frozen = _frozen_cgroup(pid)
    return f"its cgroup is frozen ({frozen})" if frozen else ""


def traced(pid: int) -> bool:
    """True when a debugger or a profiler holds the process."""
    return status(pid).get("TracerPid", "0") != "0"


def _frozen_cgroup(pid: int) -> str:
    """The freezer (v1) or cgroup (v2) that keeps `pid` still; "" when there is none."""
    for path in group_files(pid, "freezer", "freezer.state", "cgroup.events"):
        with contextlib.suppress(OSError):
            if re.search("^(FROZEN|frozen 1)$", path.read_text(), re.MULTILINE):
                return str(path.parent)
    return ""
