"""Memory that is with the keeper for the length of a transfer only: handed on, to the next keeper as well, and taken back."""

from __future__ import annotations

import contextlib
import threading

from ftrun.core.handle import Handle
from ftrun.worker.runtime.fd_store import KeeperClient


class Lent:
    """What one worker has lent. `again` is called by the doorbell thread, the rest by the main thread."""

    def __init__(self, keeper: KeeperClient) -> None:
        self._keeper = keeper
        self._lock = threading.Lock()
        self._items: dict[tuple[int, str], tuple[int, int, Handle | None]] = {}

    def hand_on(self, rank: int, name: str, cell: int, fd: int, handle: Handle | None = None) -> bool:
        """Have the keeper pass `fd` on as `name` of `rank`, until `take_back`. False = there is no keeper now: call again."""
        with self._lock:
            self._items[rank, name] = cell, fd, handle
            return self._send()

    def again(self) -> bool:
        """There is a new keeper: it gets everything. False = it is not there yet."""
        with self._lock:
            return self._send()

    def take_back(self, rank: int, name: str) -> None:
        """The keeper lets go of it. Before the descriptor is closed."""
        with self._lock:
            self._items.pop((rank, name), None)
            with contextlib.suppress(OSError):  # a dead keeper holds nothing any more
                self._keeper.forget(rank, name)

    def _send(self) -> bool:
        try:
            for (rank, name), (cell, fd, handle) in self._items.items():
                self._keeper.put(rank, name, cell, fd, handle)
        except OSError:
            return False
        return True
