"""Memory that is with the fd store for the length of a transfer only: handed on, to the next fd store as well, and taken back."""

from __future__ import annotations

import contextlib
import threading

from ftrun.core.shared.handle import Handle
from ftrun.worker.runtime.fd_store import FdStoreClient


class Lent:
    """What one worker has lent. `again` is called by the doorbell thread, the rest by the main thread."""

    def __init__(self, fd_store: FdStoreClient) -> None:
        self._fd_store = fd_store
        self._lock = threading.Lock()
        self._items: dict[tuple[int, str], tuple[int, int, Handle | None]] = {}

    def hand_on(self, rank: int, name: str, cell: int, fd: int, handle: Handle | None = None) -> bool:
        """Have the fd store pass `fd` on as `name` of `rank`, until `take_back`. False = there is no fd store now: call again."""
        with self._lock:
            self._items[rank, name] = cell, fd, handle
            return self._send()

    def again(self) -> bool:
        """There is a new fd store: it gets everything. False = it is not there yet."""
        with self._lock:
            return self._send()

    def take_back(self, rank: int, name: str) -> None:
        """The fd store lets go of it. Before the descriptor is closed."""
        with self._lock:
            self._items.pop((rank, name), None)
            with contextlib.suppress(OSError):  # a dead fd store holds nothing any more
                self._fd_store.forget(rank, name)

    def _send(self) -> bool:
        try:
            for (rank, name), (cell, fd, handle) in self._items.items():
                self._fd_store.put(rank, name, cell, fd, handle)
        except OSError:
            return False
        return True
