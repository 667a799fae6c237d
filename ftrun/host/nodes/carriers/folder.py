"""Keeps records in a folder that all nodes see: a file for each, replaced by a rename, created under a file lock.

The folder of a run holds a numbered folder for each session. A session that has ended (it has a record `over`) is never used
again: the next start with the same run id takes the next number, so that no agent reads records of an earlier run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from ftrun.core.errors import UsageError
from ftrun.core.system import files
from ftrun.host.nodes.carriers.carrier import OVER, Record, session

_LOCK = ".lock"
_SUFFIX = ".json"


def prepare(endpoint: str, run_id: str) -> Path:
    """Return the private folder of run `run_id` under the shared folder `endpoint`; make it if it is missing.

    Raises:
        UsageError: The shared folder is missing or unsafe, or cannot be written.
    """
    shared = Path(endpoint)
    try:
        info = os.stat(shared)
    except OSError as error:
        raise UsageError(
            f"rendezvous folder {shared}: {error.strerror}; it must exist on every node (is it mounted here?)"
        ) from None
    if not stat.S_ISDIR(info.st_mode):
        raise UsageError(f"rendezvous folder {shared} is not a directory")
    if info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX:
        raise UsageError(
            f"rendezvous folder {shared} can be written by others (mode {info.st_mode & 0o7777:o}), who could take it over; "
            f"run: chmod go-w {shared}, or use a folder of yours"
        )
    if info.st_uid not in (os.getuid(), 0) and not info.st_mode & stat.S_ISVTX:
        raise UsageError(f"rendezvous folder {shared} belongs to user {info.st_uid}, not to you; use a folder of yours")
    folder = shared / f"ftrun-{run_id}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to the rendezvous folder {shared}: {error.strerror}") from None
    _check_own(folder)
    return folder


def _check_own(folder: Path) -> None:
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise UsageError(f"{folder} is not a directory of yours; remove it, or choose another run id")
    if info.st_mode & 0o022:
        raise UsageError(f"{folder} can be written by others (mode {info.st_mode & 0o777:o}); run: chmod go-w {folder}")


class Folder:
    """A carrier in a folder that `prepare` returned. `patience`: seconds to wait for the lock.

    Raises:
        OSError: The folder cannot be read or written.
    """

    serves = False

    def __init__(self, folder: Path, patience: float) -> None:
        from filelock import FileLock  # not at the first record that a repair creates: it takes 25 ms

        self._path = self._session(folder)
        self._lock = FileLock(self._path / _LOCK, timeout=patience)
        self._known: dict[str, tuple[tuple[int, int, int], Record]] = {}

    @staticmethod
    def _session(folder: Path) -> Path:
        numbers = [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
        number, outdated = session(numbers, lambda one: (folder / str(one) / f"{OVER}{_SUFFIX}").exists())
        for old in outdated:
            shutil.rmtree(folder / str(old), ignore_errors=True)
        path = folder / str(number)
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def view(self) -> Mapping[str, Record]:
        # over NFS this agent's own beat, a rename in this folder, makes the client read the folder anew
        found: dict[str, tuple[int, int, int]] = {}
        with os.scandir(self._path) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX) and not entry.name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):
                        info = entry.stat()
                        found[entry.name.removesuffix(_SUFFIX)] = (info.st_ino, info.st_mtime_ns, info.st_size)
        for name, mark in found.items():
            known = self._known.get(name)
            if known is None or known[0] != mark:
                record = self._read(name)
                if record is not None:
                    self._known[name] = (mark, record)
        for name in [n for n in self._known if n not in found]:
            # a listing may miss a file that is being replaced
            if not (self._path / f"{name}{_SUFFIX}").exists():
                del self._known[name]
        return {name: record for name, (_, record) in self._known.items()}

    def _read(self, name: str) -> Record | None:
        try:
            raw = json.loads((self._path / f"{name}{_SUFFIX}").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return raw if isinstance(raw, dict) else None

    def put(self, name: str, record: Record) -> None:
        files.replace(self._path / f"{name}{_SUFFIX}", json.dumps(record), private=True)

    def create(self, name: str, record: Record) -> bool:
        with self._lock:
            if (self._path / f"{name}{_SUFFIX}").exists():
                return False
            self.put(name, record)
            return True

    def close(self) -> None:
        """Do nothing: a folder is not held open."""
