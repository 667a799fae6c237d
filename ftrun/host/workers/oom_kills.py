"""Tells an out-of-memory kill from a plain SIGKILL: by the kernel's log where it is readable, else by the cgroup's counters.

The counters are in the worker's own cgroup: memory.oom_control (v1) or memory.events (v2). The kernel counts before it kills,
so the counters are up to date once the death is visible. A plain SIGKILL changes neither.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from ftrun.core.system.cgroup import group_files

_KERNEL = "/dev/kmsg"
_KILLED = re.compile(r"(?:Out of memory|Memory cgroup out of memory): Killed process (\d+)")
_RECORD = 8192


class Kills:
    """Counts out-of-memory kills and attributes each of them to one death."""

    def __init__(self) -> None:
        self._files: dict[int, Path] = {}  # pid -> its cgroup's counter
        self._seen: dict[Path, int] = {}  # kills that are attributed
        self._latest: dict[Path, int] = {}  # kills counted at the last call of `expire`
        self._kernel = _open_kernel()
        self._named: set[int] = set()  # pids that the kernel's log names as killed

    def watch(self, pid: int) -> None:
        """Remember the counter of the cgroup of a process. Call while the process lives."""
        path = next(group_files(pid, "memory", "memory.oom_control", "memory.events"), None)
        if path is not None:
            self._files[pid] = path
            self._seen.setdefault(path, _count(path))

    def evidence(self, pid: int) -> str:
        """Return a sentence when an out-of-memory kill ended `pid`, which died by SIGKILL; "" without such evidence."""
        self._read_kernel()
        if pid in self._named:
            return f"the kernel says that it killed process {pid} because memory was short"
        path = self._files.pop(pid, None)
        if path is None:
            return ""
        now, before = _count(path), self._seen.get(path, 0)
        if now <= before:
            return ""
        self._seen[path] = before + 1  # each kill explains one death
        return f"the kernel counted an out-of-memory kill in its cgroup ({path})"

    def expire(self) -> None:
        """Attribute the kills that the last call counted to other processes (a child of the script). Call now and then."""
        for path, before in self._latest.items():
            self._seen[path] = max(self._seen[path], before)
        self._latest = {path: _count(path) for path in self._seen}

    def _read_kernel(self) -> None:
        if self._kernel is None:
            return
        while True:
            try:
                record = os.read(self._kernel, _RECORD)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # records were overwritten before we read them
            except OSError:
                os.close(self._kernel)
                self._kernel = None
                return
            for match in _KILLED.finditer(record.decode(errors="replace")):
                self._named.add(int(match[1]))


def _open_kernel() -> int | None:
    """Open the kernel's log at its end; return None when reading it is not permitted."""
    try:
        fd = os.open(_KERNEL, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        os.close(fd)
        return None
    return fd


def _count(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return 0
