"""Exchange addresses between the ranks of a group: on one machine through files in the run directory, else through the run's store.

Files need no server. A TCPStore takes two round trips through one more process for each address, on processors that are busy just
then. torch's FileStore looks every 10 ms (a value arrives 4 ms late, here 1 ms) and does not notice meanwhile that the world stops.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from ftrun.core.shared.world import World
from ftrun.core.system import files

_PAUSE, _LONGEST = 0.0002, 0.02  # seconds between two looks for a value that is not there yet
_GROWTH = 0.02  # share of the time waited so far


class Meeting(Store):
    """A torch Store for one group (by its key) in one generation, in which each key is set once.

    A wait for a value calls `go_on` again and again. It raises to end the wait, and returns whether the time counts: it does
    not count while a member is known to be on its way.
    """

    def __init__(self, timeout: timedelta, go_on: Callable[[], bool]) -> None:
        super().__init__()
        self._patience = timeout
        self._go_on = go_on

    def read(self, key: str) -> bytes | None:
        """Return the value of `key`, None if nobody has set it."""
        raise NotImplementedError

    def get(self, key: str) -> bytes:
        """Wait for the value of `key`, and return it.

        Raises:
            TimeoutError: If nobody sets it in time.
            BaseException: Whatever `go_on` raises.
        """
        begin = counted = time.monotonic()
        while (value := self.read(key)) is None:
            now = time.monotonic()
            if not self._go_on():
                counted = now
            if now - counted > self._patience.total_seconds():
                raise TimeoutError(f"nobody set {key} within {self._patience}")
            time.sleep(min(max(_PAUSE, _GROWTH * (now - begin)), _LONGEST))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for the values of `keys` as `get` does, and return them."""
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for the values of `keys` as `get` does. `timeout` is ignored."""
        self.multi_get(keys)

    def forget_earlier(self) -> None:
        """Forget earlier meetings of this group, once every member came to this one."""


class FarMeeting(Meeting):
    """A meeting of ranks on several nodes, in the store of their run.

    Raises:
        RuntimeError: By every method, if the store cannot be reached (torch's DistStoreError and its like).
    """

    def __init__(self, world: World, group: str, timeout: timedelta, go_on: Callable[[], bool]) -> None:
        super().__init__(timeout, go_on)
        store: Any = TCPStore(world.store_host, world.store_port, None, False, timeout, wait_for_workers=False)
        self._store: Any = PrefixStore(f"{world.prefix()}/{group}/meeting", store)

    def set(self, key: str, value: str | bytes) -> None:
        """Publish `value`."""
        self._store.set(key, value)

    def read(self, key: str) -> bytes | None:
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def check(self, keys: list[str]) -> bool:
        """Are all of `keys` there? Does not wait."""
        return bool(self._store.check(keys))


class FileMeeting(Meeting):
    """A meeting of ranks on one machine: each key is a file."""

    def __init__(self, run_dir: Path, world: World, group: str, timeout: timedelta, go_on: Callable[[], bool]) -> None:
        super().__init__(timeout, go_on)
        self._of_group = run_dir / "meetings" / hashlib.blake2s(group.encode(), digest_size=8).hexdigest()
        self._when = world.attempt, world.generation
        self._folder = self._of_group / f"{world.attempt}.{world.generation}"
        files.make_folder(self._folder)

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "_")

    def set(self, key: str, value: str | bytes) -> None:
        """Publish `value` atomically.

        Raises:
            OSError: If the file cannot be written.
        """
        path = self._path(key)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        files.write_private(temporary, value)
        os.replace(temporary, path)

    def read(self, key: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return self._path(key).read_bytes()
        return None

    def check(self, keys: list[str]) -> bool:
        """Are all of `keys` there? Does not wait."""
        return all(self._path(key).exists() for key in keys)

    def forget_earlier(self) -> None:
        """Delete the files of earlier meetings of this group, once every member came to this one."""
        for folder in self._of_group.iterdir():
            if tuple(map(int, folder.name.split("."))) < self._when:
                shutil.rmtree(folder, ignore_errors=True)
