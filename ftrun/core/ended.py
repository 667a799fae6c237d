"""Runs that ended, by name, from any folder: a line for each in one file of this user. The journal in a run's log folder stays the truth.

A run whose journal is gone is not listed. A file that cannot be written or read costs the names, nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftrun.core import paths, shape
from ftrun.core.system import files

_FILE = "ended.jsonl"
_KEPT = 200  # lines, when the file has grown long
_LONG = 256 << 10  # bytes

_LINE = shape.record(
    {"run": shape.text, "logs": shape.text, "began": shape.number, "ended": shape.number},
    {"argv": shape.listed(shape.text), "cwd": shape.text, "code": shape.maybe(shape.whole)},
)


@dataclass(frozen=True)
class EndedRun:
    """Unix times; `code` None = it was cut off. `name` is that of its log folder."""

    name: str
    logs: Path
    argv: tuple[str, ...]
    cwd: str
    began: float
    ended: float
    code: int | None

    @property
    def journal(self) -> Path:
        return self.logs / paths.JOURNAL


def add(raw: dict[str, Any], code: int | None) -> None:
    """Write down that the run with this run.json has ended, if its journal is kept."""
    logs = Path(str(raw.get("logs", "")))
    if not logs.is_absolute() or not (logs / paths.JOURNAL).is_file():
        return
    line = {"run": logs.name, "logs": str(logs), "began": raw["started"], "ended": time.time(), "code": code}
    line |= {key: raw[key] for key in ("argv", "cwd") if key in raw}
    with contextlib.suppress(OSError):
        path = _path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, (json.dumps(line) + "\n").encode())  # one write: lines of two runs never mix
            long = os.fstat(fd).st_size > _LONG
        finally:
            os.close(fd)
        if long:
            kept = path.read_text(encoding="utf-8").splitlines()[-_KEPT:]
            files.replace(path, "\n".join(kept) + "\n", private=True)


def can_be_named() -> bool:
    """Will a run of this user be found by its name after its end, from any folder?"""
    folder = _path().parent
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK)


def ended_runs() -> list[EndedRun]:
    """Newest first; each log folder once."""
    found: dict[Path, EndedRun] = {}
    try:
        lines = _path().read_bytes().splitlines()
    except OSError:
        return []
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            raw = shape.loads(line)
            if _LINE(raw):
                argv, logs = tuple(raw.get("argv", ())), Path(raw["logs"])
                run = EndedRun(raw["run"], logs, argv, raw.get("cwd", ""), raw["began"], raw["ended"], raw.get("code"))
                if logs not in found and run.journal.is_file():
                    found[logs] = run
    return list(found.values())


def _path() -> Path:
    return paths.state_dir() / _FILE
