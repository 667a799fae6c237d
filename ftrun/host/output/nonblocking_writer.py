"""Writes our own stdout and stderr without ever blocking the loop, even when nobody reads them.

Behind a stalled reader the queue grows; callers check `waiting` and stop before it grows too large.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Callable

from ftrun.host.base.loop import EventLoop

BACKLOG_MAX = 16 << 20  # bytes in the queue at which the workers have to wait
_ATOMIC = select.PIPE_BUF  # a pipe that polls writable takes this much without blocking
RETRY = 0.02  # seconds until another try after a reader did not keep up


class Outlet:
    """Writes to one of our own output descriptors, only when it can take data. `waiting`: bytes in the queue."""

    def __init__(self, fd: int, loop: EventLoop, on_broken: Callable[[str], None]) -> None:
        self.fd = fd
        self._own = _reopened(fd)
        self.waiting = 0
        self.broken = False
        self._loop = loop
        self._on_broken = on_broken
        self._queue: deque[memoryview] = deque()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._watching = False

    def write(self, data: bytes) -> None:
        if self.broken or not data:
            return
        self._queue.append(memoryview(data))
        self.waiting += len(data)
        if not self._watching:
            self.flush()

    def flush(self, block_ms: int = 0) -> None:
        """Write as much as the reader takes; wait at most `block_ms` milliseconds each time it takes nothing."""
        until = time.monotonic() + block_ms / 1000
        while self._queue and not self.broken:
            ready = self._poll.poll(block_ms)
            if not ready:
                self._wait()
                return
            chunk = self._queue.popleft()
            try:
                done = os.write(self._own, chunk[:_ATOMIC])
            except BlockingIOError:  # it had room, but not for this chunk
                self._queue.appendleft(chunk)
                if time.monotonic() < until:
                    time.sleep(RETRY)
                    continue
                self._try_later()
                return
            except OSError as error:
                self.broken = True
                self._queue.clear()
                self.waiting = 0
                self._stop_waiting()
                self._on_broken(error.strerror or str(error))
                return
            until = time.monotonic() + block_ms / 1000
            self.waiting -= done
            if done < len(chunk):
                self._queue.appendleft(chunk[done:])

    def _wait(self) -> None:
        """Resume when the descriptor takes data again."""
        if self._watching:
            return
        self._watching = True
        try:
            self._loop.watch(self.fd, self._resume, write=True)
        except PermissionError:  # epoll refuses a regular file, which never blocks
            self._loop.after(RETRY, self._resume)

    def _try_later(self) -> None:
        """Retry after RETRY seconds, for a descriptor that polls writable and takes nothing."""
        if not self._watching:
            self._watching = True
            self._loop.after(RETRY, self._resume)

    def _stop_waiting(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.forget(self.fd)

    def _resume(self) -> None:
        self._stop_waiting()
        self.flush()


def _reopened(fd: int) -> int:
    """Reopen a terminal in non-blocking mode, without changing the flags of `fd`, which others share; return `fd` for other files."""
    if os.isatty(fd):
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    return fd


def same_file(one: int, other: int) -> bool:
    """Do both descriptors lead to one file, pipe or terminal?"""
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False
