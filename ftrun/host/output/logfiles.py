"""Writes the log files of a run: one for each rank, stream and attempt, in torchrun's layout.

`<log dir>/<run>/attempt_<n>/<local rank>/{stdout,stderr}.log`, with `spare-<cell>` in place of the rank for a spare. Several
incarnations of a rank append to one file and never tear each other's lines. A failed write is reported and the run goes on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from ftrun.core import paths
from ftrun.core.system import files
from ftrun.host.output.logformat import STREAMS, LogPlace

_HELD_MAX = 1 << 20  # bytes of an unfinished line that a sink keeps back while another incarnation may write
_COPY = 1 << 20


def claim_folder(base: Path, run: str) -> Path:
    """Make a folder for the run: `base/run`, or `base/run_<random>` when an earlier run has that.

    Raises:
        OSError: The folder cannot be made.
    """
    files.make_folder(base)
    folder = base / run
    while True:
        try:
            folder.mkdir(mode=0o700)
            return folder
        except FileExistsError:
            folder = base / f"{run}_{os.urandom(4).hex()}"


class LogFile:
    """Appends to a file, which is open while it has a `Sink`. `broken`: the file could not be opened, or a write failed."""

    def __init__(self, path: Path, on_broken: Callable[[Path, str], None]) -> None:
        self.path = path
        self.broken = False
        self._on_broken = on_broken
        self._fd: int | None = None
        self._sinks: list[Sink] = []
        self._unfinished: Sink | None = None  # the writer of the last line, while that is unfinished

    @property
    def shared(self) -> bool:
        return len(self._sinks) > 1

    def join(self, sink: Sink) -> None:
        self._sinks.append(sink)
        if self._fd is None and not self.broken:
            try:
                files.make_folder(self.path.parent)
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            except OSError as error:
                self._fail(error)

    def leave(self, sink: Sink) -> None:
        self._sinks.remove(sink)
        if len(self._sinks) == 1:
            self._sinks[0].flush()
        if not self._sinks and self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def append(self, sink: Sink, data: bytes) -> None:
        if self._fd is None or not data:
            return
        if self._unfinished is not None and self._unfinished is not sink:
            data = b"\n" + data
        self._unfinished = None if data.endswith(b"\n") else sink
        try:
            done = os.write(self._fd, data)
            while done < len(data):  # the disk is about to be full: the next write raises the reason
                done += os.write(self._fd, data[done:])
        except OSError as error:
            os.close(self._fd)
            self._fd = None
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.broken = True
        self._on_broken(self.path, error.strerror or str(error))


class Sink:
    """One incarnation's access to a log file. Data goes to the file at once, or in whole lines while the file has other sinks."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._held = b""
        file.join(self)

    def write(self, data: bytes) -> None:
        data, self._held = self._held + data, b""
        if self._file.shared and len(data) <= _HELD_MAX:
            cut = data.rfind(b"\n") + 1
            data, self._held = data[:cut], data[cut:]
        self._file.append(self, data)

    def flush(self) -> None:
        """Write the unfinished line that the sink keeps back."""
        held, self._held = self._held, b""
        self._file.append(self, held)

    def close(self) -> None:
        self.flush()
        self._file.leave(self)

    def bring(self, path: Path) -> None:
        """Append the content of a file that has no writer any more, and remove that file."""
        with contextlib.suppress(OSError):
            with path.open("rb", buffering=0) as written:
                while data := written.read(_COPY):
                    self.write(data)
            if not self._file.broken:
                path.unlink()


class Files:
    """Holds all log files of a run, under `folder`, and calls `on_unsaved(path, reason)` when one cannot be written."""

    def __init__(self, folder: Path, on_unsaved: Callable[[Path, str], None]) -> None:
        self.folder = folder
        self._on_unsaved = on_unsaved
        self._files: dict[Path, LogFile] = {}

    def folder_of(self, place: LogPlace) -> Path:
        return paths.attempt_logs(self.folder, place.attempt) / place.folder

    def file(self, place: LogPlace, stream: str) -> LogFile:
        return self._file(self.folder_of(place) / f"{stream}.log")

    def filtered(self, attempt: int, stream: str) -> LogFile:
        """Return the file that gets a copy of the lines that match a filter."""
        return self._file(paths.attempt_logs(self.folder, attempt) / f"filtered_{stream}.log")

    def _file(self, path: Path) -> LogFile:
        # a closed file stays in the table: the next incarnation has to know whether the last line is finished
        if path not in self._files:
            self._files[path] = LogFile(path, self._on_unsaved)
        return self._files[path]

    def remove_empty(self, place: LogPlace) -> None:
        """Remove the folder of a spare that wrote nothing, or whose output moved to a rank's files."""
        folder = self.folder_of(place)
        with contextlib.suppress(OSError):
            for stream in STREAMS:
                path = folder / f"{stream}.log"
                if path.exists() and path.stat().st_size == 0:
                    path.unlink()
            folder.rmdir()
