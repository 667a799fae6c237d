"""Serves the launcher's descriptors and timers in one loop. It knows nothing about runs.

It serves `urgent` descriptors first, and the others only if none was ready, so that the caller acts on urgent news first.
"""

from __future__ import annotations

import heapq
import itertools
import select
import time
from collections.abc import Callable


class EventLoop:
    """Calls handlers when descriptors are ready or times have come; see `run_once`."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._handlers: dict[int, tuple[bool, Callable[[], None]]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.woke = time.monotonic_ns()  # monotonic time in ns of the current wake-up

    def watch(self, fd: int, handler: Callable[[], None], *, urgent: bool = False, write: bool = False) -> None:
        """Call `handler` whenever `fd` is readable (with `write`: writable).

        Raises:
            PermissionError: `fd` is a regular file.
        """
        self._poll.register(fd, select.EPOLLOUT if write else select.EPOLLIN)
        self._handlers[fd] = (urgent, handler)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`; call before closing it. Does nothing about a descriptor that is not watched."""
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def after(self, seconds: float, handler: Callable[[], None]) -> None:
        """Call `handler` once, after `seconds`."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), handler))

    def run_once(self, longest: float = 3600.0) -> None:
        """Wait at most `longest` seconds, then serve the ready descriptors (urgent ones only, if there are any) and due timers."""
        timeout = longest
        if self._timers:
            timeout = min(timeout, max(0.0, self._timers[0][0] - time.monotonic()))
        ready = self._poll.poll(timeout)
        self.woke = time.monotonic_ns()
        served = self._serve(ready, True)
        if not served:
            self._serve(ready, False)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def _serve(self, ready: list[tuple[int, int]], urgent: bool) -> bool:
        served = False
        for fd, _ in ready:
            entry = self._handlers.get(fd)  # an earlier handler may have forgotten it
            if entry is not None and entry[0] is urgent:
                entry[1]()
                served = True
        return served

    def close(self) -> None:
        self._poll.close()
