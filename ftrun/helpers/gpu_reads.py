"""Memory on a GPU, read by the worker that uses it, for replacements on other nodes.

The fd store has no context on a GPU, and making one would take hundreds of megabytes of a device that may be full. A worker has one. So
it lends the fd store a buffer that both map, and copies into it what it is asked for over a connection that stays open
(ftrun/worker/repair/gpu_reader.py). Nothing is asked for while nothing is repaired.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading

from ftrun.core.shared import wire

_LIMIT = 90.0  # seconds for a part; the worker gives up earlier


class GpuReads:
    """The memory of one worker, `size` bytes. `sock`: connection to it; `fd`: the buffer. Readers take turns."""

    def __init__(self, sock: socket.socket, fd: int, size: int) -> None:
        self.size = size
        self._sock, self._fd = sock, fd
        self._room = os.fstat(fd).st_size
        self._lock = threading.RLock()

    def over(self) -> bool:
        """Has the worker hung up?"""
        asked = select.poll()
        at = self._sock.fileno()
        if at >= 0:
            asked.register(at, select.POLLRDHUP)
        return at < 0 or bool(asked.poll(0))

    def read(self, room: memoryview, at: int) -> int:
        """Read into `room` from offset `at`; return how many bytes.

        Raises:
            OSError: The worker is gone, or its device gave nothing.
        """
        size = min(len(room), self._room)
        with self._lock:
            try:
                self._sock.settimeout(_LIMIT)
                wire.send(self._sock, {"at": at, "size": size})
                answer = wire.receive(self._sock)
            except OSError:
                self.end()  # an answer that comes late must not be taken for that of the next question
                raise
            if answer is None or not answer[0].get("ok"):
                raise OSError("the worker did not read its device")
            return os.preadv(self._fd, [room[:size]], 0)

    def close(self) -> None:
        """Nothing was opened for a reader."""

    def end(self) -> None:
        """Hang up. A reader that waits for the worker fails at once."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            if self._fd >= 0:
                self._sock.close()
                os.close(self._fd)
                self._fd = -1
