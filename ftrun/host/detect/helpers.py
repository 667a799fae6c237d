"""Our own helper processes stand still like any other: one that owes an answer and is stopped, frozen or hung is killed.

Its listener deals with what follows from its death. Works as long as the loop does, so also while a run ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ftrun.host.base.context import LaunchContext
from ftrun.host.detect.heartbeat import Beat, BeatWatch
from ftrun.host.detect.work import Work
from ftrun.host.services.services import Helper, Services

_SILENT = 2.0  # seconds without a word after which a helper is asked for one: each question wakes it
_INTERVAL = 1.0  # seconds after which an answer is overdue, and the process looked at
_HUNG = 30.0  # seconds that a process which runs may take for an answer
_BUSY = 0.1  # seconds of work between two signs of it, of a helper that begins
_UNKILLABLE = 5.0  # seconds that a killed one may take to end: the kernel may never come to it (state D, a frozen cgroup v1)


class HelperWatch:
    """`on_lost(pid)`: a killed helper does not end, and its clients must not wait for it."""

    def __init__(self, context: LaunchContext, services: Services, on_lost: Callable[[int], None]) -> None:
        self._loop = context.loop
        self._listener = context.listener
        self._starting = max(_HUNG, context.settings.start_timeout)  # without a word and without work
        self._work = Work()
        self._worked: dict[int, float] = {}
        self._services = services
        self._on_lost = on_lost
        self._beats: BeatWatch[int] = BeatWatch(_INTERVAL)
        self._killed: set[int] = set()

    def look(self) -> None:
        """Look, if it is time; call it often: a wake-up of the launcher is dearer than what it does then."""
        if self._beats.pause:
            return
        living = {helper.pid: helper for helper in self._services.living()}
        self._killed &= living.keys()
        for helper in living.values():
            helper.ask_alive(_SILENT)
        beginning = [helper for helper in living.values() if not helper.ready]
        for pid, work in self._work.done(helper.pid for helper in beginning).items():
            # it imports, maybe from a file system that takes its time
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
