"""Looks up runs from another process: reads run.json from run directories. This file writes nothing."""

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
    """A run directory, with the content `raw` of its run.json."""

    run_id: str
    path: Path
    pid: int
    raw: dict[str, Any]

    @property
    def started(self) -> float:
        """Return the unix time at which the launcher claimed the run."""
        return float(self.raw["started"])

    def is_near(self) -> bool:
        """Is the run in our pid namespace? A run in another container that shares the folder of runs is not."""
        return str(self.raw.get("pids", namespace())) == namespace()

    def alive(self) -> bool:
        """Does its launcher run now?"""
        return process_start(self.pid) == int(self.raw["start"])


def read_run(path: Path) -> RunInfo | None:
    """Read the run in directory `path`; return None if it is not a run directory, or its run.json is damaged."""
    try:
        raw = shape.loads((path / paths.RUN_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return RunInfo(path.name, path, raw["pid"], raw) if _RUN(raw) else None


def list_runs() -> list[RunInfo]:
    """Return this user's live runs, newest first."""
    found = (read_run(p) for p in paths.runs_root().iterdir() if not p.name.startswith("."))
    return sorted((r for r in found if r is not None and r.alive()), key=lambda r: -r.started)


def find_run(run_id: str | None) -> RunInfo | None:
    """Return the live run of that name, or for None the newest live one; None if there is none."""
    return next((r for r in list_runs() if run_id in (None, r.run_id)), None)


def live_run(run_id: str | None) -> RunInfo:
    """Return the run as `find_run` does.

    Raises:
        NoRunError: There is none.
    """
    run = find_run(run_id)
    if run is None:
        named = "" if run_id is None else f" named {run_id}"
        raise NoRunError(f"no live run{named}; those that live: ftrun runs, those that ended: ftrun runs --all")
    return run


def run_named(run_id: str) -> RunInfo | None:
    """Return the run of that name, also if its launcher is gone; None if there is no such run directory."""
    root = paths.runs_root()
    return None if os.sep in run_id or run_id.startswith(".") else read_run(root / run_id)


def owner_elsewhere(run_id: str) -> int | None:
    """Return the user id of another owner of a run of that name in the usual places that we may read; None = no such run."""
    for root in (*Path("/dev/shm").glob("ftrun-*"), *Path("/tmp").glob("ftrun-*"), *Path("/run/user").glob("*/ftrun")):
        with contextlib.suppress(OSError):
            owner = os.stat(root / run_id).st_uid
            if owner != os.getuid():
                return owner
    return None
