"""Keeps room in the run directory for one more repair when its file system is full: data loaders fill /dev/shm, too.

A file holds the room. The launcher removes it when a write finds no space, and makes it again later. No run begins without it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from ftrun.core import paths

_BYTES = 256 << 10  # for a world file, and the files that the ranks exchange in a repair
_FULL = (errno.ENOSPC, errno.EDQUOT)


def trouble(run_dir: Path, error: OSError) -> str:
    """Return a sentence about the trouble with the run directory behind an error of the launcher, "" for an error of another kind."""
    if not run_dir.is_dir():
        return (
            f"the run's folder {run_dir} was removed while the run needed it; keep whatever removed it (a cleaning job?) away from "
            f"there, or set {paths.ENV_RUNS_ROOT} to another private folder, and start again"
        )
    if error.errno in _FULL:
        return (
            f"{run_dir.parent} has no room left for the run's own files, of which it keeps some {_BYTES >> 10} kB there (a full "
            f"/dev/shm?); free some, or set {paths.ENV_RUNS_ROOT} to a private folder with room, and start again"
        )
    return ""


class Reserve:
    """The reserve of one run directory. `log` takes messages for the user.

    Raises:
        OSError: There is no room.
    """

    def __init__(self, run_dir: Path, log: Callable[[str], None]) -> None:
        self._path = run_dir / paths.RESERVE
        self._log = log
        self._kept = False
        self._make()

    def keep(self) -> bool:
        """Make the reserve again if there is room; return whether it exists."""
        with contextlib.suppress(OSError):
            self._make()
        return self._kept

    def _make(self) -> None:
        if self._kept:
            return
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, _BYTES)
            finally:
                os.close(fd)
            self._kept = True
        except OSError:
            self._give_up()
            raise

    def write(self, action: Callable[[], None]) -> None:
        """Call `action`, which writes to the run directory; if that finds no space, free the reserve and call it once more.

        Raises:
            OSError: The action failed for another reason, or the reserve was not enough.
        """
        try:
            action()
        except OSError as error:
            if error.errno not in _FULL or not self._kept:
                raise
            self._give_up()
            self._log(
                f"no space is left in {self._path.parent.parent} (a full /dev/shm?); the repair goes on in a reserve of "
                f"{_BYTES >> 10} kB, which is made again when there is room: free some"
            )
            action()

    def _give_up(self) -> None:
        self._kept = False
        with contextlib.suppress(OSError):
            self._path.unlink()
