"""Runs as another process sees them: run.json read from a run directory. Never writes."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftrun.core import paths, shape
from ftrun.core.errors import NoRunError
from ftrun.core.system.procfs import namespace, process_start

_RUN = shape.record(
    {"pid": shape.whole, "start": shape.whole, "started": shape.number},
    {
        "argv": shape.listed(shape.text),
        **dict.fromkeys(("world_size", "spares"), shape.whole),
        **dict.fromkeys(("logs", "log_dir", "cwd", "run_id", "pids"), shape.text),
        "shutdown_timeout": shape.number,
    },
)


@dataclass(frozen=True)
class RunInfo:
    """A run directory as another process sees it, with the content of its run.json."""

    run_id: str
    path: Path
    pid: int
    raw: dict[str, Any]

    @property
    def started(self) -> float:
        """Unix time at which the run was claimed."""
        return float(self.raw["started"])

    def is_near(self) -> bool:
        """Do its pids mean to us what they mean to it? Not in another container that shares the folder of runs."""
        return str(self.raw.get("pids", namespace())) == namespace()

    def alive(self) -> bool:
        """Does its launcher still run, now?"""
        return process_start(self.pid) == int(self.raw["start"])


def read_run(path: Path) -> RunInfo | None:
    """The run in directory `path`, None when it is not a run directory, or its run.json is damaged."""
    try:
        raw = shape.loads((path / paths.RUN_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return RunInfo(path.name, path, raw["pid"], raw) if _RUN(raw) else None


def list_runs() -> list[RunInfo]:
    """Live runs of this user, newest first."""
    found = (read_run(p) for p in paths.runs_root().iterdir() if not p.name.startswith("."))
    return sorted((r for r in found if r is not None and r.alive()), key=lambda r: -r.started)


def find_run(run_id: str | None) -> RunInfo | None:
    """The live run of that name, or the newest live one."""
    return next((r for r in list_runs() if run_id in (None, r.run_id)), None)


def live_run(run_id: str | None) -> RunInfo:
    """The run that `find_run` finds.

    Raises:
        NoRunError
    """
    run = find_run(run_id)
    if run is None:
        named = "" if run_id is None else f" named {run_id}"
        raise NoRunError(f"no live run{named}; those that live: ftrun runs, those that ended: ftrun runs --all")
    return run


def run_named(run_id: str) -> RunInfo | None:
    """The run directory of that name, also one whose launcher is gone."""
    root = paths.runs_root()
    return None if os.sep in run_id or run_id.startswith(".") else read_run(root / run_id)


def owner_elsewhere(run_id: str) -> int | None:
    """The other user who has a run of that name in a usual place, as far as we may look."""
    for root in (*Path("/dev/shm").glob("ftrun-*"), *Path("/tmp").glob("ftrun-*"), *Path("/run/user").glob("*/ftrun")):
        with contextlib.suppress(OSError):
            owner = os.stat(root / run_id).st_uid
            if owner != os.getuid():
                return owner
    return None
