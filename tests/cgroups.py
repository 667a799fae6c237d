"""Control groups for tests that need a limit or a freezer of their own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.conftest import wait_for


def make(controller: str) -> Path:
    """A new cgroup (v1) below our own; skips the test where that may not be made."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    root = Path("/sys/fs/cgroup") / controller
    if controller not in own or not root.is_dir():
        pytest.skip(f"no {controller} controller of cgroup v1 on this machine")
    parent = root / own[controller].strip("/")
    group = (parent if parent.exists() else root) / f"ftrun-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cgroups may not be made here: {error}")
    return group


def remove(group: Path) -> None:
    def removed() -> bool:
        with contextlib.suppress(OSError):  # its processes are still ending
            group.rmdir()
        return not group.exists()

    wait_for(removed, f"the end of all processes in {group}", 10)


def make_v2(controller: str) -> Path | None:
    """A new cgroup (v2) below our own, or below the root, where processes may enter it and the controller is on."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()).get("")
    for parent in () if own is None else (Path("/sys/fs/cgroup") / own.strip("/"), Path("/sys/fs/cgroup")):
        children = parent / "cgroup.subtree_control"
        if children.exists() and controller in children.read_text().split():
            group = parent / f"ftrun-test-{os.getpid()}"
            with contextlib.suppress(OSError):
                group.mkdir()
                return group
    return None
