"""Removes the logs of old runs from the default folder while it is too large.

A folder goes only if it is surely ours: it has the journal of a run that ended, the name that this run gave it, and only files
that ftrun writes. A live run, on this machine or another, has no journal there yet. `ended.forget` keeps the names of the removed runs.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import stat
import time
from pathlib import Path

from ftrun.core import ended, paths
from ftrun.core.shape import loads

OLD = 30 * 86400.0  # seconds since a run's end after which its logs may go
_OURS = re.compile(
    r"journal\.jsonl|services\.log|attempt_\d+(/metrics\.jsonl|/filtered_(stdout|stderr)\.log|/(\d+|spare-\d+)(/(stdout|stderr)\.log|/error\.json)?)?"
)
_FIRST = b'{"t": '  # the first bytes of a journal
_LINE_MAX = 4 << 20  # bytes of a journal's first line, at most
_IGNORE = "# written by ftrun: logs are no source\n*\n"


def tidy(base: Path, most: float) -> list[str]:
    """Keep the default log folder out of version control; remove logs older than OLD while it holds more than `most` bytes.

    Return the folder names of the removed logs, the oldest first.
    """
    with contextlib.suppress(OSError), open(base / ".gitignore", "x", encoding="utf-8") as file:
        file.write(_IGNORE)
    removed: list[str] = []
    if most == math.inf:
        return removed
    with contextlib.suppress(OSError):
        old = sorted(found for found in map(_ended, base.iterdir()) if found is not None and found[0] < time.time() - OLD)
        left = _size(base) if old else 0
        for when, folder in old:
            if left > most and _is_ours(folder):
                size = _size(folder)
                shutil.rmtree(folder, ignore_errors=True)
                if not os.path.lexists(folder):
                    left -= size
                    removed.append(folder.name)
                    ended.forget(folder, when)
    return removed


def _size(folder: Path) -> int:
    """Return the total size in bytes of the files below `folder`."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            info = path.lstat()
            total += 0 if stat.S_ISDIR(info.st_mode) else info.st_size
    return total


def _ended(folder: Path) -> tuple[float, Path] | None:
    """Return the end (unix time) of the run in that folder, and the folder; None unless an ended run surely named it."""
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


def _is_ours(folder: Path) -> bool:
    return all(
        _OURS.fullmatch(path.relative_to(folder).as_posix()) and not path.is_symlink() for path in folder.rglob("*")
    )
