"""A page shared with forked children, and children that are always killed and reaped."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator

import pytest

from ftrun import native

PAGE = 4096
DEADLINE = 20.0  # generous: these machines are busy


class Children:
    """Forks that run one function each. None of them survives the test."""

    def __init__(self) -> None:
        self._live: set[int] = set()

    def fork(self, body: Callable[[], object]) -> int:
        """Run `body` in a child, which ends with status 0 when it returns and 1 when it raises. Returns its pid."""
        pid = os.fork()
        if pid == 0:
            status = 1
            faulthandler.disable()  # some of these children die on purpose
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            try:
                body()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        self._live.add(pid)
        return pid

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def wait(self, pid: int) -> int:
        """Exit status as the subprocess module gives it: negative for a signal."""
        until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
        self._live.discard(pid)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def end(self) -> None:
        for pid in self._live:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._live.clear()


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; fail after DEADLINE seconds."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.002)


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    made.end()


@pytest.fixture
def page() -> Iterator[int]:
    """Address of a zeroed shared page."""
    fd = os.memfd_create("ftrun-test")
    os.ftruncate(fd, PAGE)
    address = native.map_fd(fd, PAGE)
    os.close(fd)
    yield address
    native.unmap(address, PAGE)
