"""Resolve the argument RUN: the name of a live or ended run, or a path to its folder or journal. Reads only.

An ended run leaves its log folder, found in this folder's logs, and a line in the user's list of ended runs.
"""

from __future__ import annotations

import datetime as dt
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ftrun.core import paths
from ftrun.core.ended import ended_runs, without_logs
from ftrun.core.errors import NoRunError
from ftrun.core.runs import RunInfo, find_run, list_runs, read_run


@dataclass(frozen=True)
class Found:
    """A run with a journal. `live` is None after its launcher has ended."""

    run_id: str
    journal: Path
    live: RunInfo | None


def find(name: str | None, log_dir: str | None = None) -> Found | None:
    """Find a run, or return None.

    With a `name`: the run of that name, or the folder or journal file at that path. Without: the newest live run, else the
    newest with a journal in `log_dir` (default: PET_LOG_DIR, else ./ftrun-logs), else the newest ended run of this user.
    """
    if name is not None and os.sep in name:
        return _at(Path(name))
    run = find_run(name)
    if run is not None:
        return _living(run)
    logs = Path(log_dir or os.environ.get("PET_LOG_DIR") or paths.LOG_DIR)
    return _killed(name) or _ended(name, logs) or _ended_elsewhere(name)


def newest_here() -> Found | None:
    """Find the newest live run that started in this folder, else the newest run with logs here."""
    live = next((run for run in list_runs() if run.raw.get("cwd") == os.getcwd()), None)
    return _ended(None, Path(os.environ.get("PET_LOG_DIR") or paths.LOG_DIR)) if live is None else _living(live)


def _living(run: RunInfo) -> Found:
    return Found(run.run_id, run.path / paths.JOURNAL, run)


def require(name: str | None) -> Found:
    """Find a run as `find` does.

    Raises:
        NoRunError: There is no such run.
    """
    found = find(name)
    if found is not None:
        return found
    if name is None:
        raise NoRunError("no live run, and none that left a journal; name the folder of its logs instead")
    gone = next((run for run in without_logs() if _is_called(run.name, name)), None)
    if gone is not None:
        when = f"ftrun removed its logs on {_day(gone.removed)} (--keep-logs)" if gone.removed else "its logs are not there any more"
        raise NoRunError(f"run {gone.name} ended on {_day(gone.ended)}, and {when}, so there is nothing left to show: {gone.logs}")
    raise NoRunError(
        f"no run named {name}: it does not run, and is not among those that ended (ftrun runs --all); name the folder of its "
        "logs instead"
    )


def _day(when: float) -> str:
    return dt.date.fromtimestamp(when).isoformat()


def _at(path: Path) -> Found | None:
    folder = path.parent if path.is_file() else path
    journal = path if path.is_file() else folder / paths.JOURNAL
    if not os.path.isfile(journal):
        return None
    run = read_run(folder)
    return Found(folder.absolute().name, journal, run if run is not None and run.alive() else None)


def _killed(name: str | None) -> Found | None:
    """Find the run directory of a run whose processes were all killed before they could remove it."""
    if name is None or name.startswith("."):
        return None
    path = paths.runs_root() / name
    return Found(name, path / paths.JOURNAL, None) if os.path.isfile(path / paths.JOURNAL) else None


def _ended(name: str | None, logs: Path) -> Found | None:
    journals = sorted(logs.glob(f"*/{paths.JOURNAL}"), key=lambda p: p.stat().st_mtime, reverse=True)
    for journal in journals:
        folder = journal.parent.name
        if _is_called(folder, name):
            return Found(folder, journal, None)
    return None


def _is_called(folder: str, name: str | None) -> bool:
    """Does `name` match the run with that log folder?"""
    return name is None or re.fullmatch(re.escape(name) + paths.AGAIN, folder) is not None


def _ended_elsewhere(name: str | None) -> Found | None:
    run = next((run for run in ended_runs() if _is_called(run.name, name)), None)
    return None if run is None else Found(run.name, run.journal, None)
