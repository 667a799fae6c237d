"""Device memory that the fd store holds: imported from its descriptor, so that it lives on when its maker is killed.

Imports run in threads of their own: a driver that hangs must not keep the fd store from ending workers of a dead launcher.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ftrun.native import cuda


class Imported:
    """One import. `let_go` may be called at any time, from the fd store's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handle: int | None = None
        self._dropped = False

    def begin(self, device: bytes, fd: int, done: Callable[[str], None]) -> None:
        """Import what `fd` stands for (the caller keeps it open until `done`); `done` gets "" or why not, in a thread."""

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
        """Give the memory back, now or when the import that still runs is over."""
        with self._lock:
            self._dropped = True
            handle, self._handle = self._handle, None
        if handle is not None:
            threading.Thread(target=cuda.let_go, args=(handle,), name="ftrun-let-go", daemon=True).start()


def _ordinal_of(uuid: bytes) -> int:
    """Only for a driver that wants a context: any device serves when the fd store does not see the right one."""
    return next((i for i in range(cuda.device_count()) if cuda.device(i).uuid == uuid), 0)
