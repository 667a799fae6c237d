"""Which run is meant by RUN: a live one by name, one that ended by the journal it left, or a path to either.

Reads only. A run that ended leaves its log folder, which is looked for beside this folder's logs, and a line among this
user's runs that ended.
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
    """A run with a journal. `live` is None once its launcher is gone."""

    run_id: str
    journal: Path
    live: RunInfo | None


def find(name: str | None, log_dir: str | None = None) -> Found | None:
    """The run called `name` (or the folder or journal file at that path); without a name the newest live run, else the
    newest that left a journal in `log_dir` (default: PET_LOG_DIR, else ./ftrun-logs), or anywhere. None when there is none."""
    if name is not None and os.sep in name:
        return _at(Path(name))
    run = find_run(name)
    if run is not None:
        return _living(run)
    logs = Path(log_dir or os.environ.get("PET_LOG_DIR") or paths.LOG_DIR)
    return _killed(name) or _ended(name, logs) or _ended_elsewhere(name)


def newest_here() -> Found | None:
    """The newest run of this folder: the newest live one that was started here, else the newest that left its logs here."""
    live = next((run for run in list_runs() if run.raw.get("cwd") == os.getcwd()), None)
    return _ended(None, Path(os.environ.get("PET_LOG_DIR") or paths.LOG_DIR)) if live is None else _living(live)


def _living(run: RunInfo) -> Found:
    return Found(run.run_id, run.path / paths.JOURNAL, run)


def require(name: str | None) -> Found:
    """As `find`.

    Raises:
        NoRunError
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
    """A run directory that nobody was left to remove."""
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
    """May the run with that log folder be meant by `name`?"""
    return name is None or re.fullmatch(re.escape(name) + paths.AGAIN, folder) is not None


def _ended_elsewhere(name: str | None) -> Found | None:
    run = next((run for run in ended_runs() if _is_called(run.name, name)), None)
    return None if run is None else Found(run.name, run.journal, None)
