"""What this process's container lets it have, read from the cgroup files of version 1 and 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def memory_left() -> int | None:
    """Bytes that this process's cgroup and those above it may still take; None when no limit can be read."""
    left = [_left(here, "memory.max", "memory.current", "") for here in _groups("")]
    left += [_left(here, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_") for here in _groups("memory")]
    return min((size for size in left if size is not None), default=None)


def processors() -> float:
    """Processors that this process may use: those it may run on, or what a quota of a cgroup leaves of them."""
    quotas = [_quota(here / "cpu.max", None) for here in _groups("")]
    quotas += [_quota(here / "cpu.cfs_quota_us", here / "cpu.cfs_period_us") for here in _groups("cpu")]
    return min([len(os.sched_getaffinity(0)), *(quota for quota in quotas if quota is not None)])


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of those above it ("" = version 2).

    In a container the lower ones may not be there; the root is.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            root = _ROOT / (controllers if controller else "")
            if controller and not root.exists():
                root = _ROOT / controller
            here = root / path.strip("/")
            yield here
            while here != root:
                here = here.parent
                yield here


def _left(here: Path, limit_name: str, usage_name: str, prefix: str) -> int | None:
    """What the memory limit of one group leaves."""
    try:
        limit, usage = (here / limit_name).read_text().strip(), int((here / usage_name).read_text())
        stat = dict(line.split() for line in (here / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdigit() or int(limit) >= 1 << 60:
        return None
    # the cache of files is counted as used, and given back when memory is asked for
    cache = int(stat.get(f"{prefix}inactive_file", 0)) + int(stat.get(f"{prefix}active_file", 0))
    return int(limit) - usage + cache


def _quota(file: Path, period: Path | None) -> float | None:
    """Processors' worth of time in one group's quota; None = without one."""
    try:
        words = [*file.read_text().split(), *(period.read_text().split() if period is not None else [])]
        return int(words[0]) / int(words[1]) if int(words[0]) > 0 else None
    except (OSError, ValueError, IndexError, ZeroDivisionError):
        return None
