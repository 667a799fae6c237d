"""A shared folder with the troubles of a network file system: two mounts of one folder, each a FUSE file system in a process of its own.

`Share` starts the processes and tells each what is wrong, by a file that it reads at each operation. Locks stay on each mount, as with
NFS's `nolock`.
"""

from __future__ import annotations

import ctypes.util
import errno
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.conftest import ROOT, wait_for

FETCHED = ROOT / "build" / "fuse"  # where `make engines` unpacks libfuse
_T = TypeVar("_T")


def _library() -> str | None:
    fetched = sorted(FETCHED.glob("**/libfuse3.so.[34]"))
    return ctypes.util.find_library("fuse3") or (str(fetched[0]) if fetched else None)


def _missing() -> str:
    """What a FUSE file system lacks here, "" = nothing."""
    if importlib.util.find_spec("mfusepy") is None or _library() is None:
        return "no mfusepy or no libfuse3 here; `make engines` fetches them"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no access to /dev/fuse"
    return "" if os.getuid() == 0 or shutil.which("fusermount3") else "only root may mount here"


_WHY_NOT = _missing()
needs_fuse = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "-")


class Share:
    """Two mounts, in `mounts`. `stale`: for how many seconds each may answer with what was true before."""

    def __init__(self, base: Path, stale: float = 0.0) -> None:
        self.backing = base / "backing"
        self.backing.mkdir(mode=0o700, parents=True)
        self.mounts = [base / f"mount{number}" for number in range(2)]
        self._told = [base / f"trouble{number}.json" for number in range(2)]
        self._processes: list[subprocess.Popen[bytes]] = []
        for mount, told in zip(self.mounts, self._told, strict=True):
            mount.mkdir()
            told.write_text("{}")
            words = [str(self.backing), str(mount), str(told), str(stale)]
            with mount.with_suffix(".log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.host.nodes.share", *words],
                    cwd=ROOT,
                    env={**os.environ, "FUSE_LIBRARY_PATH": _library() or ""},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            self._processes.append(process)
        for mount, process in zip(self.mounts, self._processes, strict=True):
            wait_for(lambda m=mount, p=process: os.path.ismount(m) or p.poll() is not None, f"the mount {mount}", 20.0)  # type: ignore[misc]
            assert process.poll() is None, mount.with_suffix(".log").read_text()

    def trouble(self, *mounts: int, **what: Any) -> None:
        """Let these mounts, or all, have this trouble and no other from now on; none: they work.

        `delay`: seconds that each operation takes; `hang`: none ends; `error`: number of the error with which all that write fail; `fails`:
        the share of operations that fail with ESTALE or EIO; `links`: False = no hard links.
        """
        for number in mounts or range(len(self.mounts)):
            new = self._told[number].with_suffix(".new")
            new.write_text(json.dumps(what))
            new.replace(self._told[number])

    def close(self) -> None:
        self.trouble()
        for mount, process in zip(self.mounts, self._processes, strict=True):
            subprocess.run(["umount", "-l", str(mount)], check=False, capture_output=True)
            if os.path.ismount(mount):
                subprocess.run(["fusermount3", "-uz", str(mount)], check=False, capture_output=True)
            process.terminate()  # the mount may live on in another namespace, made meanwhile
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5.0)


# -- the file system's process -----------------------------------------------------------------------------------------


class _Remembered:
    """What was true of a path, for some seconds. `forget` is for what this mount itself changed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._known: dict[tuple[str, str], tuple[float, Any]] = {}
        self._lock = threading.Lock()

    def get(self, what: str, path: str, find: Callable[[], _T]) -> _T:
        now = time.monotonic()
        with self._lock:
            until, value = self._known.get((what, path), (0.0, None))
        if now >= until:
            try:
                value = find()
            except OSError as error:
                value = error
            with self._lock:
                self._known[what, path] = now + self._seconds, value
        if isinstance(value, OSError):
            raise OSError(value.errno, os.strerror(value.errno or 0))
        return value  # type: ignore[no-any-return]

    def forget(self, *paths: str) -> None:
        with self._lock:
            for path in paths:
                self._known.pop(("stat", path), None)
                self._known.pop(("names", os.path.dirname(path)), None)


def _operations(root: str, told: Path, stale: float) -> Any:
    import mfusepy

    remembered = _Remembered(stale)
    chance = random.Random(7)

    def within(path: str) -> str:
        return root + path

    def trouble() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(told.read_text())
        return found

    def passes(writes: bool = False) -> None:
        what = trouble()
        if what.get("delay"):
            time.sleep(what["delay"])
        while what.get("hang"):
            time.sleep(0.05)
            what = trouble()
        if writes and what.get("error"):
            raise mfusepy.FuseOSError(what["error"])
        if chance.random() < what.get("fails", 0.0):
            raise mfusepy.FuseOSError(chance.choice((errno.ESTALE, errno.EIO)))

    def changed(path: str, do: Callable[..., object], *more: int) -> int:
        """Do something to a file or folder that a mount may remember."""
        passes(writes=True)
        do(within(path), *more)
        remembered.forget(path)
        return 0

    class Mount(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def init_with_config(self, connection: Any, config: Any) -> None:
            config.use_ino = True
            config.hard_remove = True
            config.attr_timeout = config.entry_timeout = config.negative_timeout = stale

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            passes()
            info = os.fstat(fh) if fh is not None else remembered.get("stat", path, lambda: os.lstat(within(path)))
            found = {k: getattr(info, k) for k in ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size")}
            return {**found, **{f"st_{k}time": getattr(info, f"st_{k}time_ns") for k in "amc"}}

        def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
            passes()
            names = remembered.get("names", path, lambda: os.listdir(within(path)))
            return [(name, {"st_ino": 1}, 0) for name in (".", "..", *names)]  # an entry without a number would not be listed

        def open(self, path: str, flags: int) -> int:
            passes(bool(flags & (os.O_WRONLY | os.O_RDWR)))
            return os.open(within(path), flags)

        def create(self, path: str, mode: int, flags: int) -> int:
            passes(writes=True)
            remembered.forget(path)
            return os.open(within(path), os.O_RDWR | os.O_CREAT | (flags & os.O_EXCL), mode)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            passes()
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            passes(writes=True)
            remembered.forget(path)
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            passes(writes=True)
            remembered.forget(path)
            os.truncate(within(path) if fh is None else fh, length)
            return 0

        def flush(self, path: str, fh: int) -> int:
            passes()
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def rename(self, old: str, new: str) -> int:
            passes(writes=True)
            os.rename(within(old), within(new))
            remembered.forget(old, new)
            return 0

        def link(self, target: str, source: str) -> int:
            passes(writes=True)
            if not trouble().get("links", True):
                raise mfusepy.FuseOSError(errno.EPERM)
            os.link(within(source), within(target))
            remembered.forget(source, target)
            return 0

        def unlink(self, path: str) -> int:
            return changed(path, os.unlink)

        def mkdir(self, path: str, mode: int) -> int:
            return changed(path, os.mkdir, mode)

        def rmdir(self, path: str) -> int:
            return changed(path, os.rmdir)

        def chmod(self, path: str, mode: int) -> int:
            return changed(path, os.chmod, mode)

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            passes(writes=True)
            os.utime(within(path), ns=times)
            return 0

    return Mount()


def _serve(root: str, mount: str, told: str, stale: str) -> None:
    import mfusepy

    mfusepy.FUSE(_operations(root, Path(told), float(stale)), mount, foreground=True, fsname="share")


if __name__ == "__main__":
    _serve(*sys.argv[1:])


@pytest.fixture
def shares(tmp_path: Path) -> Iterator[Callable[..., Share]]:
    """Make a share, which is gone with the test."""
    made: list[Share] = []

    def make(**terms: Any) -> Share:
        made.append(Share(tmp_path / f"share{len(made)}", **terms))
        return made[-1]

    yield make
    for share in made:
        share.close()
