"""Makes a process run out of host memory, in a memory cgroup for this process alone, so that no other process is in danger.

The kernel kills the process, not this file. Without the right to make a memory cgroup it raises NotPossible with the reason.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ftrun.core.system.cgroup import group_files

LIMIT = 64 << 20  # bytes that the process may allocate after it entered the group
_CHUNK = 4 << 20
_PREFIX = "ftrun-oom-"


class NotPossible(Exception):
    """No memory cgroup can be made here; the message says why."""


def why_not() -> str:
    """Return the reason why this user cannot make a memory cgroup on this machine, "" if it works."""
    try:
        discard(make())
    except NotPossible as error:
        return str(error)
    return ""


def make() -> Path:
    """Make a memory cgroup below this process's own, with the limit and without swap.

    Raises:
        NotPossible: There is no memory cgroup here, or this user may not make one.
    """
    parent = _own()
    group = parent / f"{_PREFIX}{os.getpid()}"
    version2 = not (parent / "memory.limit_in_bytes").exists()
    try:
        group.mkdir(exist_ok=True)
        if version2:
            (group / "memory.max").write_text(str(LIMIT))
            _quietly(group / "memory.swap.max", "0")
        else:
            (group / "memory.limit_in_bytes").write_text(str(LIMIT))
            _quietly(group / "memory.swappiness", "0")
    except OSError as error:
        discard(group)
        raise NotPossible(
            f"oom needs a memory cgroup of its own, so that the kernel kills nothing else, and {group} cannot be made "
            f"({error.strerror}); give this user a delegated cgroup (systemd-run --user --scope -p Delegate=yes), or "
            "inject kill instead"
        ) from None
    return group


def _own() -> Path:
    # every group of version 2 has cgroup.controllers; only the root group has no limit
    for path in group_files("self", "memory", "memory.limit_in_bytes", "cgroup.controllers"):
        return path.parent
    raise NotPossible("oom needs a memory cgroup, and this machine shows none in /sys/fs/cgroup; inject kill instead")


def _quietly(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):  # this kernel has no such setting
        path.write_text(text)


def enter(group: Path) -> None:
    """Move this process into the group.

    Raises:
        NotPossible: The kernel refuses it.
    """
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        raise NotPossible(f"this process cannot enter {group} ({error.strerror})") from None


def eat() -> None:
    """Allocate memory until the kernel kills this process, which must have entered the group.

    Raises:
        RuntimeError: The process took four times the limit and was not killed.
    """
    taken = []
    for _ in range(4 * LIMIT // _CHUNK):
        taken.append(b"\1" * _CHUNK)
    raise RuntimeError(f"took {len(taken) * _CHUNK >> 20} MiB under a limit of {LIMIT >> 20} and was not killed")


def discard(group: Path) -> bool:
    """Remove an empty group; return False if it cannot be removed, as while a process is in it."""
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
