"""Writes our own stdout and stderr without ever blocking the loop, also when nobody reads them.

A reader that does not read makes a queue grow; its writers are asked to look at `waiting`.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Callable

from ftrun.host.base.loop import EventLoop

BACKLOG_MAX = 16 << 20  # bytes waiting for a slow reader before the workers have to wait
_ATOMIC = select.PIPE_BUF  # a pipe that polls writable takes this much without blocking
RETRY = 0.02  # seconds until a reader that did not keep up is tried again


class Outlet:
    """One of our own output descriptors, written only when it can take data."""

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
        """Write what the reader takes now; wait at most `block_ms` for it to take more."""
        until = time.monotonic() + block_ms / 1000
        while self._queue and not self.broken:
            ready = self._poll.poll(block_ms)
            if not ready:
                self._wait()
                return
            chunk = self._queue.popleft()
            try:
                done = os.write(self._own, chunk[:_ATOMIC])
            except BlockingIOError:  # it had room, but not for this
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
        """Go on when the descriptor takes data again."""
        if self._watching:
            return
        self._watching = True
        try:
            self._loop.watch(self.fd, self._resume, write=True)
        except PermissionError:  # a file, which never makes anybody wait
            self._loop.after(RETRY, self._resume)

    def _try_later(self) -> None:
        """Wait as `_wait`, for a descriptor that says that it takes data and does not."""
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
    """A terminal of our own that never blocks: one that polls writable may take less than we write. Others' flags stay."""
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
