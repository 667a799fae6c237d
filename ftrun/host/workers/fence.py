"""Making sure that a worker runs no more code, and learning how it ended before anybody could reap it.

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
    """Let a worker that only gives its memory back do so when nobody else needs the processor.

    Taking a process of 400 MB down takes tens of milliseconds, which the repair of the world needs. Nothing happens
    when the process is gone.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, pid, _LOWEST)


def quiet(pid: int) -> bool:
    """True when no task of the process will run user code again."""
    for task in tasks(pid):
        fields = stat(pid, task)
        if fields is not None and not int(fields[_FLAGS]) & _PF_EXITING and fields[_STATE] not in "ZX":
            return False
    return True


def lives(pid: int) -> bool:
    """True when a task of the process goes on: it neither ends nor has a SIGKILL to take.

    So it is after an exec, which ends every thread but one and gives up what they held. The end of a process looks the same for the
    moment between two tasks' ends, or between a SIGKILL that was taken and the end that follows.
    """
    for task in tasks(pid):
        fields = stat(pid, task)
        # before Linux 5.16 a process that dumps its core has given up its locks by then
        if fields is None or int(fields[_FLAGS]) & (_PF_EXITING | _PF_DUMPCORE) or fields[_STATE] in "ZX":
            continue
        pending = status(pid, task).get("SigPnd")
        if pending is not None and not int(pending, 16) & _SIGKILL_BIT:
            return True
    return False


def code_is_set(pid: int) -> bool:
    """Is it known by now with which code the process ends? False while that cannot be told, and when it was reaped.

    The kernel marks a task as exiting, notes its code, then takes its memory away: a busy machine may stop it in between.
    """
    fields = stat(pid)
    return fields is not None and int(fields[_VSIZE]) == 0 and quiet(pid)


def ended(pid: int) -> bool:
    """True when no task of the process or of its group is left but zombies: what it had open is closed.

    A GPU runs what a process queued until its last descriptor is closed, by a forked child maybe; being quiet is not enough.
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
    """Exit code (128 + n for signal n) of a process that is dying and not yet reaped; None while it cannot be told."""
    fields = stat(pid)
    if fields is None or len(fields) <= _EXIT_CODE:
        return None
    status = int(fields[_EXIT_CODE])
    if not status and fields[_STATE] != "Z":
        return None
    return exit_code(status)


def is_ours(pid: int) -> bool:
    """True for a process that carries the name of a worker or helper of ftrun (a script's own daemon does not)."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("ftrun ")
    except OSError:
        return False
