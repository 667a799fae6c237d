"""Kills a helper process that owes an answer and is stopped, frozen or hung.

The agent handles the death as any other. The watch also works while a run ends, because it needs only the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ftrun.host.base.context import LaunchContext
from ftrun.host.detect.heartbeat import Beat, BeatWatch
from ftrun.host.detect.work import Work
from ftrun.host.services.services import Helper, Services

_SILENT = 2.0  # seconds without a message until the watch asks a helper for one; each question wakes the helper
_INTERVAL = 1.0  # seconds until an answer is overdue, and the watch looks at the process
_HUNG = 30.0  # seconds that a running process may take to answer
_BUSY = 0.1  # seconds of processor time or the like that count as a sign of work of a starting helper
_UNKILLABLE = 5.0  # seconds that a killed helper may take to end; the kernel may never end it (state D, a frozen cgroup v1)


class HelperWatch:
    """Watches the helpers of one run. `on_lost(pid)` takes a killed helper that does not end, so that no client waits for it."""

    def __init__(self, context: LaunchContext, services: Services, on_lost: Callable[[int], None]) -> None:
        self._loop = context.loop
        self._listener = context.listener
        self._starting = max(_HUNG, context.settings.start_timeout)  # seconds for a starting helper without a message or work
        self._work = Work()
        self._worked: dict[int, float] = {}
        self._services = services
        self._on_lost = on_lost
        self._beats: BeatWatch[int] = BeatWatch(_INTERVAL)
        self._killed: set[int] = set()

    def look(self) -> None:
        """Look, if it is time. Call often: the look costs less than a wake-up of the launcher for it."""
        if self._beats.pause:
            return
        living = {helper.pid: helper for helper in self._services.living()}
        self._killed &= living.keys()
        for helper in living.values():
            helper.ask_alive(_SILENT)
        beginning = [helper for helper in living.values() if not helper.ready]
        for pid, work in self._work.done(helper.pid for helper in beginning).items():
            # it imports modules, maybe from a slow file system
            if work > self._worked.get(pid, 0.0) + _BUSY:
                self._worked[pid] = work
                living[pid].shows_work()
        self._worked = {pid: work for pid, work in self._worked.items() if pid in living}
        beats = [
            Beat(pid, pid, helper.silent_since, _HUNG if helper.ready else self._starting)
            for pid, helper in living.items()
            if pid not in self._killed
        ]
        for pid, evidence in self._beats.silent(beats, time.monotonic_ns()):
            self._kill(living[pid], evidence)

    def _kill(self, helper: Helper, evidence: str) -> None:
        pid = helper.pid
        self._killed.add(pid)
        self._listener.note("service-still", service=helper.name, pid=pid, evidence=evidence)
        self._listener.log(f"our {helper.name} process (pid {pid}) stands still ({evidence}); it is killed", "warning")
        helper.kill()
        self._loop.after(_UNKILLABLE, lambda: self._on_lost(pid) if helper.pid == pid else None)
