"""Lists this user's ended runs by name: one file holds a line for each. The journal in a run's log folder stays the truth.

`ended_runs` omits a run whose journal is gone; `without_logs` lists it. If the file cannot be written or read, only the names are lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftrun.core import paths, shape

_FILE = "ended.jsonl"
_KEPT = 200  # lines that stay when the file exceeds _LONG
_LONG = 256 << 10  # bytes
_LINE_MAX = 8 << 10  # bytes of a line; a longer one loses arguments
_PATIENCE = 1.0  # seconds to wait for the lock while another run writes its line

_LINE = shape.record(
    {"run": shape.text, "logs": shape.text, "began": shape.number, "ended": shape.number},
    {
        "argv": shape.listed(shape.text),
        "cwd": shape.text,
        "code": shape.maybe(shape.whole),
        "removed": shape.number,
    },
)


@dataclass(frozen=True)
class EndedRun:
    """An ended run; times are unix times. `name`: of its log folder; `code`: exit code, None = the run was cut off.

    `removed`: when ftrun removed the log folder, 0 = never.
    """

    name: str
    logs: Path
    argv: tuple[str, ...]
    cwd: str
    began: float
    ended: float
    code: int | None
    removed: float = 0.0

    @property
    def journal(self) -> Path:
        return self.logs / paths.JOURNAL


def add(raw: dict[str, Any], code: int | None) -> None:
    """Record the end of the run with this run.json, if its journal exists."""
    logs = Path(str(raw.get("logs", "")))
    if not logs.is_absolute() or not os.path.isfile(logs / paths.JOURNAL):
        return
    line = {"run": logs.name, "logs": str(logs), "began": raw["started"], "ended": time.time(), "code": code}
    line |= {key: raw[key] for key in ("argv", "cwd") if key in raw}
    while len(json.dumps(line)) > _LINE_MAX and line.get("argv"):
        line["argv"] = line["argv"][: len(line["argv"]) // 2]
    _write(line)


def forget(logs: Path, when: float) -> None:
    """Record that ftrun removed the logs of a run that ended at `when` (unix time)."""
    _write({"run": logs.name, "logs": str(logs.absolute()), "began": when, "ended": when, "removed": time.time()})


def _write(line: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        path = _path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _append(path, (json.dumps(line) + "\n").encode())


def _append(path: Path, line: bytes) -> None:
    """Append a line, and keep only the last lines of a long file; raise OSError if the file cannot be read or written."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        ours = _lock(fd)
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        os.write(fd, b"\n" * torn + line)  # one write: lines of two runs never mix, also without the lock
        if ours and size > _LONG:
            kept = b"".join(path.read_bytes().splitlines(keepends=True)[-_KEPT:])
            os.ftruncate(fd, 0)  # in place: processes that wait for the lock have this file open
            os.write(fd, kept)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    """Lock the file until it is closed; False when the file system has no locks, or another process keeps it."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        except OSError:
            return False


def can_be_named() -> bool:
    """Can this user's ended runs be listed by name? Never raises: no run may fail for want of a name."""
    path = _path()
    if os.path.lexists(path):
        return os.path.isfile(path) and os.access(path, os.R_OK | os.W_OK)
    folder = path.parent
    while not os.path.exists(folder) and folder != folder.parent:  # a folder that we may not search does not exist for us
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def ended_runs() -> list[EndedRun]:
    """Return the ended runs whose journal exists, newest first; each log folder once."""
    return [run for run in _all() if os.path.isfile(run.journal)]


def without_logs() -> list[EndedRun]:
    """Return the ended runs whose journal is gone, newest first; each log folder once."""
    return [run for run in _all() if not os.path.isfile(run.journal)]


def _all() -> list[EndedRun]:
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
                times = raw["began"], raw["ended"], raw.get("code"), raw.get("removed", 0.0)
                found.setdefault(logs, EndedRun(raw["run"], logs, argv, raw.get("cwd", ""), *times))
    return list(found.values())


def _path() -> Path:
    return paths.state_dir() / _FILE
