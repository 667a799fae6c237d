"""Keeps the quarantined devices, which no rank gets, in a file in the run directory and in one of the user's that outlives the run.

Both are JSON, {UUID: {"reason", "since", "host", "run"}}. A person releases a device by deleting its entry: from
--quarantine-file if the run has one, else from the run's own file.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftrun.core.errors import ConfigError, UsageError
from ftrun.core.system import files

NAME = "quarantine.json"  # in the run directory
_PATIENCE = 2.0  # seconds to wait for the lock of the shared file


def read(path: Path) -> dict[str, str]:
    """Return the reasons by UUID; {} when there is no file.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: cannot read the quarantine: {reason}") from None
    return {device: str(entry.get("reason", "")) for device, entry in _entries(path, text).items()}


def check(path: Path) -> None:
    """Raise ConfigError for a file that is no quarantine, UsageError for one that cannot be written."""
    read(path)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--quarantine-file {path} cannot be written")


def _entries(path: Path, text: str) -> dict[str, dict[str, Any]]:
    if not text.strip():
        return {}
    try:
        raw = json.loads(text)
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise ConfigError(f"{path}:{line}: not JSON: {error}") from None
    if not isinstance(raw, dict) or not all(isinstance(entry, dict) for entry in raw.values()):
        raise ConfigError(f"{path}: a quarantine is an object of objects, by the device's UUID")
    return raw


class QuarantineFile:
    """The quarantine of one run. Only the constructor raises errors (ConfigError, OSError); `add` returns them as sentences."""

    def __init__(self, run_dir: Path, shared: str | None) -> None:
        self.reasons: dict[str, str] = {}
        self._run_dir = run_dir
        self._own = run_dir / NAME
        self._shared = None if shared is None else Path(shared)
        self._seen: object = None
        if self._shared is not None:
            self.reasons.update(read(self._shared))
        self._write(self._own, self.reasons)
        self._seen = self._stamp()

    @property
    def path(self) -> Path:
        """Path of the file from which a person deletes a device."""
        return self._shared or self._own

    def add(self, device: str, reason: str) -> str:
        """Add a device (UUID) to both files; return a sentence about the error, "" = none."""
        self.reasons[device] = reason
        wrong = ""
        for path in filter(None, (self._own, self._shared)):
            try:
                with self._locked(path):
                    self._write(path, {device: reason}, keep=True)
            except (OSError, TimeoutError, ConfigError) as error:
                wrong = f"the quarantine of {device} cannot be written to {path}: {error}"
        self._seen = self._stamp()
        return wrong

    def look(self) -> tuple[list[str], dict[str, str]]:
        """Return the changes of the file since the last look: UUIDs that a person deleted, and reasons by UUID that others added."""
        stamp = self._stamp()
        if stamp == self._seen:
            return [], {}
        self._seen = stamp
        try:
            now = read(self.path)
        except ConfigError:
            return [], {}  # half written: the next change of the file brings another look
        gone = [device for device in self.reasons if device not in now]
        fresh = {device: reason for device, reason in now.items() if device not in self.reasons}
        for device in gone:
            del self.reasons[device]
        self.reasons.update(fresh)
        if gone:
            with contextlib.suppress(OSError):
                self._write(self._own, self.reasons)
            self._seen = self._stamp()
        return gone, fresh

    def _stamp(self) -> object:
        try:
            info = self.path.stat()
        except OSError:
            return None
        return info.st_ino, info.st_mtime_ns, info.st_size

    def _write(self, path: Path, reasons: dict[str, str], *, keep: bool = False) -> None:
        """Write `reasons`, with `keep` in addition to the old entries; raise OSError, or ConfigError when these cannot be read."""
        before = _entries(path, path.read_text(encoding="utf-8")) if keep and path.exists() else {}
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        more = {"since": now, "host": os.uname().nodename, "run": self._run_dir.name}
        entries = {**{device: {"reason": reason, **more} for device, reason in reasons.items()}, **before}
        files.replace(path, json.dumps(entries, indent=2) + "\n")

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Lock the shared file; raise TimeoutError after _PATIENCE."""
        if path == self._own:
            yield
            return
        from filelock import FileLock

        with FileLock(f"{path}.lock", timeout=_PATIENCE):
            yield
