"""Imports device memory into the fd store from its descriptor, so that the memory outlives the worker that allocated it.

Imports run in threads of their own: a hanging driver must not keep the fd store from ending the workers of a dead launcher.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ftrun.native import cuda


class Imported:
    """One import. The fd store's thread may call `let_go` at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handle: int | None = None
        self._dropped = False

    def begin(self, device: bytes, fd: int, done: Callable[[str], None]) -> None:
        """Import the memory of `fd` in a thread, which then calls `done` with "" or an error. The caller keeps `fd` open until then."""

        def work() -> None:
            done(self._import(device, fd))

        threading.Thread(target=work, name="ftrun-import", daemon=True).start()

    def _import(self, device: bytes, fd: int) -> str:
        try:
            handle = cuda.hold(_ordinal_of(device), fd)
        except cuda.CudaError as error:
            return str(error.strerror)
        with self._lock:
            if not self._dropped:
                self._handle = handle
                return ""
        cuda.let_go(handle)
        return ""

    def let_go(self) -> None:
        """Release the memory, now or at the end of a running import."""
        with self._lock:
            self._dropped = True
            handle, self._handle = self._handle, None
        if handle is not None:
            threading.Thread(target=cuda.let_go, args=(handle,), name="ftrun-let-go", daemon=True).start()


def _ordinal_of(uuid: bytes) -> int:
    """Return the device's ordinal, 0 if the fd store does not see it: only a driver that wants a context uses it, and any device serves."""
    return next((i for i in range(cuda.device_count()) if cuda.device(i).uuid == uuid), 0)
