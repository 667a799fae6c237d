"""Logs of runs that ended long ago: removed from the default folder, so that it does not grow for ever.

Only what is surely ours goes: a folder with the journal of a run that ended, and in it nothing but files that ftrun writes.
A live run has no journal there yet, on this machine or another one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from ftrun.core import paths

KEPT = 20  # runs that ended
_OURS = re.compile(
    r"journal\.jsonl|services\.log|attempt_\d+(/metrics\.jsonl|/filtered_(stdout|stderr)\.log|/(\d+|spare-\d+)(/(stdout|stderr)\.log|/error\.json)?)?"
)
_FIRST = b'{"t": '  # how a journal begins
_IGNORE = "# written by ftrun: logs are no source\n*\n"


def tidy(base: Path) -> None:
    """Keep the default log folder out of version control, and the logs of the newest runs in it."""
    with contextlib.suppress(OSError), open(base / ".gitignore", "x", encoding="utf-8") as file:
        file.write(_IGNORE)
    with contextlib.suppress(OSError):
        ended = sorted(filter(None, map(_ended, base.iterdir())), reverse=True)
        for _, folder in ended[KEPT:]:
            if _is_ours(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _ended(folder: Path) -> tuple[float, Path] | None:
    """When the run in that folder ended, None if it may be no folder of a run, or of one that lives."""
    journal = folder / paths.JOURNAL
    if folder.is_symlink() or journal.is_symlink():
        return None
    try:
        with journal.open("rb") as file:
            return (os.fstat(file.fileno()).st_mtime, folder) if file.read(len(_FIRST)) == _FIRST else None
    except OSError:
        return None


def _is_ours(folder: Path) -> bool:
    return all(
        _OURS.fullmatch(path.relative_to(folder).as_posix()) and not path.is_symlink() for path in folder.rglob("*")
    )
