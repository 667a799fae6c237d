"""Strikes a process from outside: signals, and the death of the launcher or of a whole node.

`ftrun inject-fault` uses it, and a worker whose plan strikes more than itself. Standard library only.
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
        ProcessLookupError: The process is gone.
    """
    if kind in ("segv", "abort"):
        with contextlib.suppress(OSError):  # avoid a core file of the size of a model
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, resource.prlimit(pid, resource.RLIMIT_CORE)[1]))
    signal.pidfd_send_signal(pidfd, SIGNALS[kind])


def await_journal(run_dir: Path, firing: str) -> None:
    """Wait until the launcher's journal has `firing` (the name of its file), at most 2 s, so that the fault is on record before it strikes.

    Raises:
        OSError: The journal cannot be read.
    """
    tail = Tail(run_dir / JOURNAL)
    try:
        wait_for(
            lambda: any(noted.get("file") == firing for noted in map(whole, tail.read()) if noted), _JOURNALLED, _LOOK
        )
    finally:
        tail.close()


def kill_launcher(launcher: int) -> None:
    """Send SIGKILL to the launcher alone.

    Raises:
        ProcessLookupError: The launcher is gone.
    """
    os.kill(launcher, signal.SIGKILL)


def kill_node(launcher: int) -> None:
    """Send SIGKILL to the launcher and all its descendants, as if the machine lost power: no process can react.

    If the calling process is one of them, it goes last.

    Raises:
        ProcessLookupError: The launcher is gone.
    """
    os.kill(launcher, signal.SIGSTOP)  # stop it before it notices the other deaths
    own = os.getpid()
    struck = own in _below(launcher)
    stopped: set[int] = set()
    while new := {pid for pid in _below(launcher) if pid not in stopped and pid != own}:
        for pid in new:  # stop all before the kill, so that the fork server makes no more children
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
    """Return all descendants of a process."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        fresh = set(procfs.children(waiting.pop())) - found
        found |= fresh
        waiting += fresh
    return found
