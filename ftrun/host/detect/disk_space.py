"""Watches the room for logs, journal and board in a separate thread, because a dead network disk never answers."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from ftrun.core.faults import Fault
from ftrun.core.system.procfs import mount

_LEAST = 8 << 20  # bytes; a file system with less room is full
_EVERY = 2.0  # seconds between two looks
_MEMORY = ("tmpfs", "ramfs")


class RoomWatch:
    """Watches the file systems of one run. `places` maps the use of each folder to the folder."""

    def __init__(self, places: dict[str, Path]) -> None:
        self._places = places
        self._full: dict[str, tuple[Fault, str]] = {}
        self._reported: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftrun-room", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()

    def news(self) -> list[tuple[Fault, str]]:
        """Return fault and evidence for each place that became full since the last call."""
        full = dict(self._full)
        self._reported &= full.keys()
        fresh = [found for what, found in full.items() if what not in self._reported]
        self._reported |= full.keys()
        return fresh

    def _run(self) -> None:
        while True:
            self._full = {what: full for what, path in self._places.items() if (full := _look(what, path))}
            if self._stop.wait(_EVERY):
                return


def _look(what: str, path: Path) -> tuple[Fault, str] | None:
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    left = facts.f_bavail * facts.f_frsize
    if not facts.f_blocks or (left >= _LEAST and facts.f_favail != 0) or (facts.f_files == 0 and left >= _LEAST):
        return None
    fault = Fault.MEMORY_FULL if mount(path) in _MEMORY else Fault.DISK_FULL
    name = "shared memory" if fault is Fault.MEMORY_FULL else "the disk"
    room = "no file can be made any more" if left >= _LEAST else f"{left / 1e6:.1f} MB are left"
    return fault, f"{name} under {path} is full ({room}): {what} may be lost; make room there"
