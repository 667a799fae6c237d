"""Checks that a worker runs no more code, and reads its exit code before anybody reaps it.

Reads /proc; never waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from ftrun.core.system.procfs import exit_code, stat, status, tasks

_PF_EXITING, _PF_DUMPCORE = 0x4, 0x200
_SIGKILL_BIT = 1 << (signal.SIGKILL - 1)  # in the masks of /proc/PID/status
_LOWEST = 19  # niceness
# indices into /proc/PID/stat after the command's closing parenthesis (field number - 3)
_STATE, _GROUP, _FLAGS, _VSIZE, _EXIT_CODE = 0, 2, 6, 20, 49


def step_aside(pid: int) -> None:
    """Give a dying worker the lowest priority: freeing 400 MB takes tens of milliseconds of processor time, which the repair needs."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, pid, _LOWEST)


def quiet(pid: int) -> bool:
    """Will no task of the process run user code again?"""
    for task in tasks(pid):
        fields = stat(pid, task)
        if fields is not None and not int(fields[_FLAGS]) & _PF_EXITING and fields[_STATE] not in "ZX":
            return False
    return True


def lives(pid: int) -> bool:
    """Does a task of the process go on: does it neither end nor have a pending SIGKILL?

    A process does so after an exec, which ends every thread but one and releases their locks. A process that ends also looks like this
    for a moment: between two tasks' ends, or between taking a SIGKILL and ending.
    """
    for task in tasks(pid):
        fields = stat(pid, task)
        # before Linux 5.16 a process releases its locks before it dumps its core
        if fields is None or int(fields[_FLAGS]) & (_PF_EXITING | _PF_DUMPCORE) or fields[_STATE] in "ZX":
            continue
        pending = status(pid, task).get("SigPnd")
        if pending is not None and not int(pending, 16) & _SIGKILL_BIT:
            return True
    return False


def code_is_set(pid: int) -> bool:
    """Has the kernel set the exit code of the process? False while /proc does not tell, and after the process was reaped.

    The kernel marks a task as exiting, sets its code, then frees its memory: a busy machine may pause it in between.
    """
    fields = stat(pid)
    return fields is not None and int(fields[_VSIZE]) == 0 and quiet(pid)


def ended(pid: int) -> bool:
    """Are all tasks of the process and of its group zombies or gone, and so all their descriptors closed?

    A GPU runs the queued work of a process until its last descriptor is closed, which a forked child may hold; `quiet` is not enough.
    """
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        fields = stat(entry)
        if fields is None or (int(entry) != pid and int(fields[_GROUP]) != pid):
            continue
        if fields[_STATE] not in "ZX" or len(tasks(entry)) > 1:
            return False
    return True


def peek_exit(pid: int) -> int | None:
    """Return the exit code (128 + n for signal n) of a dying process that nobody has reaped yet; None while it is unknown."""
    fields = stat(pid)
    if fields is None or len(fields) <= _EXIT_CODE:
        return None
    status = int(fields[_EXIT_CODE])
    if not status and fields[_STATE] != "Z":
        return None
    return exit_code(status)


def is_ours(pid: int) -> bool:
    """Does the process carry the name of a worker or helper of ftrun? A script's own daemon does not."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("ftrun ")
    except OSError:
        return False
