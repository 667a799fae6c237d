"""Measures the work of processes: processor time, bytes read, waits for a disk. Reads /proc once for all of them.

Work is no progress, but a process at work does not stand still: its imports and data may come from slow file systems.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ftrun.core.system.procfs import stat, tasks

_TICK = 1 / os.sysconf("SC_CLK_TCK")
_READING = 0.05 / (1 << 20)  # seconds of work that a byte read is worth: half a MiB a second counts as busy
_STATE, _GROUP, _TIMES = 0, 2, slice(11, 15)  # see procfs.stat


class Work:
    """Measures groups of processes. Call `done` about once a second."""

    def __init__(self) -> None:
        self._disk: dict[int, float] = {}  # seconds that a group waited for a disk, by its leader; one for each look

    def done(self, leaders: Iterable[int]) -> dict[int, float]:
        """Return the seconds that each group of processes has worked so far, by its leader's pid; 0 for a group that is gone."""
        wanted = {pid for pid in leaders if pid}
        found = dict.fromkeys(wanted, 0.0)
        for entry in os.listdir("/proc") if wanted else ():
            fields = stat(entry) if entry.isdigit() else None
            if fields is None:
                continue
            leader = int(fields[_GROUP]) if int(entry) not in wanted else int(entry)
            if leader not in wanted:
                continue
            found[leader] += sum(map(int, fields[_TIMES])) * _TICK + _bytes_read(entry) * _READING
            if any((stat(entry, task) or "?")[_STATE] == "D" for task in tasks(entry)):
                self._disk[leader] = self._disk.get(leader, 0.0) + 1.0
        self._disk = {pid: seconds for pid, seconds in self._disk.items() if pid in wanted}
        return {pid: seconds + self._disk.get(pid, 0.0) for pid, seconds in found.items()}


def _bytes_read(pid: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0  # the process is gone, or this kernel does not count
    return int(lines[0].partition(":")[2]) if lines else 0
