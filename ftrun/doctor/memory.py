"""Checks memory, shared memory and their limits, which run out first when weights live in shared memory."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from ftrun.core import paths
from ftrun.core.errors import FtrunError
from ftrun.core.system.cgroup import memory_left
from ftrun.doctor.findings import BROKEN, OK, WARNING, Finding

AREA = "memory"
_LITTLE = 2 << 30
_SHM_LITTLE = 512 << 20
_RUNS_LITTLE = 64 << 20
_FILES = 4096


def check() -> Iterator[Finding]:
    yield _machine()
    yield _cgroup()
    yield _shared()
    yield _runs()
    yield _files()


def size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"


def _machine() -> Finding:
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    left, total = (int(facts[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    text = f"{size(left)} of {size(total)} free"
    if left < _LITTLE:
        return Finding(AREA, "machine", WARNING, text, "weights, gradients and optimizer state of every rank must fit")
    return Finding(AREA, "machine", OK, text)


def _cgroup() -> Finding:
    left = memory_left()
    if left is None:
        return Finding(AREA, "memory limit", OK, "none (cgroup)")
    text = f"the container's limit leaves {size(max(left, 0))} (cgroup; shared memory counts)"
    if left < _LITTLE:
        return Finding(
            AREA, "memory limit", WARNING, text, "raise it: docker run --memory, or resources.limits.memory of the pod"
        )
    return Finding(AREA, "memory limit", OK, text)


def _shared() -> Finding:
    if not os.access("/dev/shm", os.W_OK):
        return Finding(
            AREA,
            "/dev/shm",
            WARNING,
            "is missing or not writable",
            "mount a tmpfs there: DataLoader workers need it too",
        )
    free = shutil.disk_usage("/dev/shm").free
    if free < _SHM_LITTLE:
        return Finding(
            AREA,
            "/dev/shm",
            WARNING,
            f"{size(free)} free",
            "give it more: docker run --shm-size 8g, or an emptyDir with medium Memory",
        )
    return Finding(AREA, "/dev/shm", OK, f"{size(free)} free")


def _runs() -> Finding:
    try:
        root = paths.runs_root()
        (probe := root / f".doctor.{os.getpid()}").write_bytes(b"x")
        probe.unlink()
    except (FtrunError, OSError) as error:
        return Finding(
            AREA, "run folder", BROKEN, str(error), f"set {paths.ENV_RUNS_ROOT} to a private folder on a tmpfs"
        )
    free = shutil.disk_usage(root).free
    if free < _RUNS_LITTLE:
        return Finding(
            AREA, "run folder", WARNING, f"{root}: {size(free)} free", f"make room there, or set {paths.ENV_RUNS_ROOT}"
        )
    return Finding(AREA, "run folder", OK, f"{root}: {size(free)} free")


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} open files (at most {hard})"
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        return Finding(
            AREA,
            "open files",
            WARNING,
            text,
            f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}: each worker takes about ten in the launcher",
        )
    return Finding(AREA, "open files", OK, text)
