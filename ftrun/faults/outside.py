"""Faults that come from outside of the process they strike: signals, and the death of the launcher or of a whole node.

Used by `ftrun inject-fault`, and by a worker whose plan strikes more than itself. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from pathlib import Path

from ftrun.core.journal import Tail, whole
from ftrun.core.paths import JOURNAL
from ftrun.core.system import procfs
from ftrun.core.waiting import wait_for

_JOURNALLED = 2.0  # seconds
_LOOK = 0.005
SIGNALS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "segv": signal.SIGSEGV,
    "abort": signal.SIGABRT,
    "freeze": signal.SIGSTOP,
}


def strike(pidfd: int, pid: int, kind: str) -> None:
    """Send the signal of `kind` to the process.

    Raises:
        ProcessLookupError: When it is gone.
    """
    if kind in ("segv", "abort"):
        with contextlib.suppress(OSError):  # no core file of the size of a model
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, resource.prlimit(pid, resource.RLIMIT_CORE)[1]))
    signal.pidfd_send_signal(pidfd, SIGNALS[kind])


def await_journal(run_dir: Path, firing: str) -> None:
    """Give the launcher the time to note its own end: until the journal has `firing` (its file), or a moment is over."""
    tail = Tail(run_dir / JOURNAL)
    try:
        wait_for(
            lambda: any(noted.get("file") == firing for noted in map(whole, tail.read()) if noted), _JOURNALLED, _LOOK
        )
    finally:
        tail.close()


def kill_launcher(launcher: int) -> None:
    """SIGKILL for the launcher alone.

    Raises:
        ProcessLookupError
    """
    os.kill(launcher, signal.SIGKILL)


def kill_node(launcher: int) -> None:
    """SIGKILL for the launcher and everything below it, as if the machine lost its power: nobody gets to react.

    The calling process may be one of them; it goes last.

    Raises:
        ProcessLookupError: When the launcher is gone.
    """
    os.kill(launcher, signal.SIGSTOP)  # it must not see the others die
    own = os.getpid()
    struck = own in _below(launcher)
    stopped: set[int] = set()
    while new := {pid for pid in _below(launcher) if pid not in stopped and pid != own}:
        for pid in new:  # stopped before they are killed: a fork server makes no more children
            stopped.add(pid)
            _send(pid, signal.SIGSTOP)
    for pid in (*stopped, launcher):
        _send(pid, signal.SIGKILL)
    if struck:
        _send(own, signal.SIGKILL)


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def _below(pid: int) -> set[int]:
    """Every descendant."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        fresh = set(procfs.children(waiting.pop())) - found
        found |= fresh
        waiting += fresh
    return found
