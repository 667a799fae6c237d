"""Logs of runs that ended long ago: removed from the default folder, so that it does not grow for ever.

Only what is surely ours goes: a folder with the journal of a run that ended, under the name that this run gave it, and in
it nothing but files that ftrun writes. A live run has no journal there yet, on this machine or another one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from ftrun.core import paths
from ftrun.core.shape import loads

KEPT = 20  # runs that ended, of those that made a step, and of the others: failed starts push out no training
_OURS = re.compile(
    r"journal\.jsonl|services\.log|attempt_\d+(/metrics\.jsonl|/filtered_(stdout|stderr)\.log|/(\d+|spare-\d+)(/(stdout|stderr)\.log|/error\.json)?)?"
)
_FIRST = b'{"t": '  # how a journal begins
_LINE_MAX = 4 << 20  # bytes of its first line
_STEPPED = b'"kind": "Stepped"'
_IGNORE = "# written by ftrun: logs are no source\n*\n"


def tidy(base: Path) -> int:
    """Keep the default log folder out of version control, and the logs of the newest runs in it. How many runs' logs went."""
    with contextlib.suppress(OSError), open(base / ".gitignore", "x", encoding="utf-8") as file:
        file.write(_IGNORE)
    removed = 0
    with contextlib.suppress(OSError):
        ended = sorted(filter(None, map(_ended, base.iterdir())), reverse=True)
        left = {True: KEPT, False: KEPT}
        for _, folder in ended if len(ended) > KEPT else ():
            stepped = _stepped(folder)
            left[stepped] -= 1
            if left[stepped] < 0 and _is_ours(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed += not os.path.lexists(folder)
    return removed


def _ended(folder: Path) -> tuple[float, Path] | None:
    """When the run in that folder ended, None if it may be no folder of a run, or of one that lives, or a person named it."""
    journal = folder / paths.JOURNAL
    try:
        if folder.is_symlink() or journal.is_symlink():
            return None
        with journal.open("rb") as file:
            line = file.readline(_LINE_MAX)
            raw = loads(line) if line.startswith(_FIRST) else None
            run = raw.get("run") if isinstance(raw, dict) else None
            if not isinstance(run, str) or not re.fullmatch(re.escape(run) + paths.AGAIN, folder.name):
                return None
            return os.fstat(file.fileno()).st_mtime, folder
    except (OSError, ValueError):
        return None


def _stepped(folder: Path) -> bool:
    """Did a worker of that run make a step?"""
    with contextlib.suppress(OSError), (folder / paths.JOURNAL).open("rb") as file:
        return any(_STEPPED in line for line in file)
    return True


def _is_ours(folder: Path) -> bool:
    return all(
        _OURS.fullmatch(path.relative_to(folder).as_posix()) and not path.is_symlink() for path in folder.rglob("*")
    )
