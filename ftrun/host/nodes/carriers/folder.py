"""Keeps records in a folder that all nodes see: a file for each, replaced by a rename, created by a hard link.

The folder of a run holds a numbered folder for each session. A session that has ended (it has a record `over`) is never used
again: the next start with the same run id takes the next number, so that no agent reads records of an earlier run.

The folder lies on a network file system, which may show a node what was true some seconds ago, fail for a while, or not answer at all. A
record is created by the file server alone, where a link to a name that exists fails: no lock, and no look that may be too old.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ftrun.core.errors import UsageError
from ftrun.core.system import files
from ftrun.host.nodes.carriers.carrier import OVER, CarrierLost, Record, session

_SUFFIX = ".json"
_T = TypeVar("_T")
# what a person can do, by the number of the error
_WAYS_OUT = {
    errno.EROFS: "mount it writable",
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, your quota is used up",
    errno.EACCES: "give yourself the right to write there",
}


def prepare(endpoint: str, run_id: str, patience: float) -> Path:
    """Return the private folder of run `run_id` under the shared folder `endpoint`; make it if it is missing.

    `patience`: seconds within which the folder must answer.

    Raises:
        UsageError: The shared folder is missing or unsafe, cannot be written, or makes no hard links.
    """
    shared = Path(endpoint)
    worker = _Worker()
    try:
        return worker.do(lambda: _prepared(shared, run_id), patience)
    except TimeoutError:
        raise UsageError(f"rendezvous folder {shared} has not answered for {patience:g} s; does its file server run?") from None
    finally:
        worker.close()


def _prepared(shared: Path, run_id: str) -> Path:
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
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        _check_own(folder)
        links = makes_links(folder)
    except OSError as error:
        raise UsageError(f"cannot write to the rendezvous folder {shared}: {_what_and_way_out(error)}") from None
    if not links:
        raise UsageError(
            f"rendezvous folder {shared}: its file system makes no hard links, by which nodes agree; "
            "use another folder, or another --rdzv-backend"
        )
    return folder


def makes_links(folder: Path) -> bool:
    """Try whether a file in `folder` can be linked to another name, and to none that exists.

    Raises:
        OSError: The folder cannot be written.
    """
    first, second = (folder / f".try-{k}.{_own_name()}" for k in (1, 2))
    try:
        files.write_private(first, "")
        os.link(first, second)
        try:
            os.link(first, second)
        except FileExistsError:
            return True
        return False
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK):
            return False
        raise
    finally:
        for path in (first, second):
            with contextlib.suppress(OSError):
                path.unlink()


def _own_name() -> str:
    """Return a name that no other process has, also not one of another machine or container."""
    return f"{os.uname().nodename}.{os.getpid()}.{os.urandom(4).hex()}"


def _what_and_way_out(error: OSError) -> str:
    number = error.errno or 0
    return f"{error.strerror or error}; {_WAYS_OUT.get(number, 'is it mounted here, and does its file server answer?')}"


def _check_own(folder: Path) -> None:
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise UsageError(f"{folder} is not a directory of yours; remove it, or choose another run id")
    if info.st_mode & 0o022:
        raise UsageError(f"{folder} can be written by others (mode {info.st_mode & 0o777:o}); run: chmod go-w {folder}")


class Folder:
    """A carrier in a folder that `prepare` returned. `patience`: seconds within which the folder must answer.

    Raises:
        CarrierLost: The folder did not answer in time. No method may be called then but `close`.
        OSError: The folder cannot be read or written for now.
    """

    serves = False

    def __init__(self, folder: Path, patience: float) -> None:
        self._shared = folder.parent
        self._patience = patience
        self._worker = _Worker()
        self._records = self._do(lambda: _Records(folder))

    def view(self) -> Mapping[str, Record]:
        return self._do(self._records.view)

    def put(self, name: str, record: Record) -> None:
        self._do(lambda: self._records.put(name, record))

    def create(self, name: str, record: Record) -> bool:
        return self._do(lambda: self._records.create(name, record))

    def close(self) -> None:
        self._worker.close()

    def _do(self, act: Callable[[], _T]) -> _T:
        try:
            return self._worker.do(act, self._patience)
        except TimeoutError:
            self.close()
            raise CarrierLost(
                f"the rendezvous folder {self._shared} has not answered for {self._patience:g} s; does its file server run, and is it slow?"
            ) from None
        except OSError as error:
            raise OSError(error.errno, f"rendezvous folder {self._shared}: {_what_and_way_out(error)}") from None


class _Worker:
    """Does one thing after the other in a thread of its own, which a file system that hangs may hold for ever."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ftrun-folder", daemon=True).start()

    def do(self, act: Callable[[], _T], seconds: float) -> _T:
        """Return what `act` returns, or raise what it raises.

        Raises:
            TimeoutError: It has not ended after so many seconds. This worker cannot be used any more.
        """
        self._asked.put(act)
        try:
            well, answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None
        if well:
            found: _T = answer
            return found
        raise answer

    def close(self) -> None:
        self._asked.put(None)

    def _run(self) -> None:
        while (act := self._asked.get()) is not None:
            try:
                self._answers.put((True, act()))
            except Exception as error:  # it is the caller's
                self._answers.put((False, error))


class _Records:
    """The files of one session. Raises OSError when the folder cannot be read or written."""

    def __init__(self, folder: Path) -> None:
        self._path = self._session(folder)
        self._own = _own_name()
        self._created = 0
        self._known: dict[str, tuple[tuple[int, int, int], Record]] = {}

    @staticmethod
    def _session(folder: Path) -> Path:
        numbers = [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
        number, outdated = session(numbers, lambda one: (folder / str(one) / f"{OVER}{_SUFFIX}").exists())
        for old in outdated:
            shutil.rmtree(folder / str(old), ignore_errors=True)
        path = folder / str(number)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        return path

    def view(self) -> Mapping[str, Record]:
        # over NFS this agent's own beat, a rename in this folder, makes the client read the folder anew
        found: dict[str, tuple[int, int, int]] = {}
        with os.scandir(self._path) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX) and not entry.name.startswith("."):
                    with _being_replaced():
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
            if not self._file(name).exists():
                del self._known[name]
        return {name: record for name, (_, record) in self._known.items()}

    def _file(self, name: str) -> Path:
        return self._path / f"{name}{_SUFFIX}"

    def _read(self, name: str) -> Record | None:
        raw = None
        with _being_replaced(), contextlib.suppress(ValueError):  # cut off, where the length is older than the content
            raw = json.loads(self._file(name).read_text())
        return raw if isinstance(raw, dict) else None

    def put(self, name: str, record: Record) -> None:
        path = self._path / f".{self._own}"
        files.write_private(path, json.dumps(record))
        os.replace(path, self._file(name))

    def create(self, name: str, record: Record) -> bool:
        self._created += 1
        path = self._path / f".{self._own}.{self._created}"  # another one each time: this file may be the record, soon
        try:
            files.write_private(path, json.dumps(record))
            os.link(path, self._file(name))
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
        return True


@contextlib.contextmanager
def _being_replaced() -> Iterator[None]:
    """Pass over a file that is being replaced now: the next look finds it."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
