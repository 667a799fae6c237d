"""Workers whose beat stopped: a process that is stopped or frozen is condemned, one that a debugger holds is not.

The beat comes from a native thread, so it stops only when no thread of the process runs. An overdue one is a reason to
look at the process, nothing more: what a late launcher or a paused machine missed is not the worker's silence.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable

from ftrun.core.shared.board import F
from ftrun.core.system.cgroup import group_files
from ftrun.core.system.procfs import status
from ftrun.host.workers.pool import Worker

LOOKS = 4  # looks in one interval between two beats
_OVERDUE = 1.1  # intervals: a beat that is later than this is looked into


class BeatWatch:
    """`interval`: seconds between two beats; `timeout`: seconds of silence that count without any visible reason."""

    def __init__(self, interval: float, timeout: float) -> None:
        self._interval = interval
        self._timeout = timeout
        self._suspected: set[int] = set()  # cells found stopped at the last look
        self._held: dict[int, int] = {}  # cell -> when a debugger was last seen to hold it, ns
        self._looked = time.monotonic()

    @property
    def pause(self) -> float:
        """Seconds between two looks."""
        return self._interval / LOOKS

    def silent(self, workers: Iterable[Worker], now_ns: int) -> list[tuple[Worker, str]]:
        """Workers to condemn, each with the evidence. Call every `pause` seconds; being late is noticed here."""
        now = time.monotonic()
        late = max(0.0, now - self._looked - 2 * self.pause)
        self._looked = now
        found, suspected = [], set()
        for worker in workers:
            beat = worker.cell[F.BEAT]
            if worker.reported or worker.lost or not worker.pid or not beat or not worker.watch:
                continue
            if (now_ns - beat) / 1e9 - late <= _OVERDUE * self._interval:
                continue
            if traced(worker.pid):
                self._held[worker.index] = now_ns
                continue
            since = max(beat, self._held.get(worker.index, 0))  # let go by its debugger, it needs a moment to beat
            silence = (now_ns - since) / 1e9 - late
            why = why_still(worker.pid)
            if why and worker.index in self._suspected:
                found.append((worker, f"no beat for {(now_ns - beat) / 1e9:.2f} s: {why}"))
            elif why:
                suspected.add(worker.index)  # a machine that wakes up does not wake all of its processes at once
            elif silence > self._timeout:
                found.append((worker, f"no beat for {silence:.1f} s (--heartbeat-timeout), and no reason to be seen"))
        self._suspected = suspected
        return found


def why_still(pid: int) -> str:
    """What keeps a process from running, as a sentence's end; "" when nothing does or a debugger holds it."""
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
