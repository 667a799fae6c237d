"""The launcher's one loop: descriptors, timers, and the order in which they are served. It knows nothing about runs.

Descriptors registered as `urgent` are served first, and what they caused is acted on before anything else is read.
"""

from __future__ import annotations

import heapq
import itertools
import select
import time
from collections.abc import Callable


class EventLoop:
    """`run_once` waits for the next thing and calls its handlers."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._handlers: dict[int, tuple[bool, Callable[[], None]]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.woke = time.monotonic_ns()  # when the current wake-up began

    def watch(self, fd: int, handler: Callable[[], None], *, urgent: bool = False, write: bool = False) -> None:
        """Call `handler` whenever `fd` is readable (or writable).

        Raises:
            PermissionError: For a regular file.
        """
        self._poll.register(fd, select.EPOLLOUT if write else select.EPOLLIN)
        self._handlers[fd] = (urgent, handler)

    def forget(self, fd: int) -> None:
        """Stop watching; call before closing the descriptor. Nothing when it is not watched."""
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def after(self, seconds: float, handler: Callable[[], None]) -> None:
        """Call `handler` once, in `seconds`."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), handler))

    def run_once(self, longest: float = 3600.0) -> None:
        """Wait at most `longest` seconds for something, then serve everything that is ready."""
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
