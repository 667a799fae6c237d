"""A thousand segments are made, kept, mapped and dropped, by processes that are killed at any moment: nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftrun import native
from ftrun.core import paths
from ftrun.core.shared.board import Board
from ftrun.host.services import services
from ftrun.worker.runtime.fd_store import FdStoreClient
from tests.conftest import wait_for

ROUNDS = 1000
SIZE = 1 << 20
MARK = "ftrun-round"


class Kept:
    """A real fd store process."""

    def __init__(self, run_dir: Path) -> None:
        Board.create(run_dir / paths.BOARD, 2)
        self._out = os.open(os.devnull, os.O_WRONLY)
        self._helper = services.Helper("fd store", services._FD_STORE, lambda message: None)
        self._helper.start((str(run_dir),), {**os.environ}, self._out)
        self.pid = self._helper.pid
        self.client = FdStoreClient(run_dir / paths.FD_STORE_SOCKET)
        wait_for(self._answers, "the fd store's first answer")  # its socket is there before it listens

    def _answers(self) -> bool:
        try:
            return self.client.get(0, "nothing") is None
        except OSError:
            return False

    def close(self) -> None:
        self._helper.kill()
        os.waitpid(self.pid, 0)
        os.close(self._out)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    fd_store = Kept(tmp_path)
    yield fd_store
    fd_store.close()


def descriptors(pid: int) -> list[str]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one with which our own list was read
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def marked(pid: int) -> int:
    """Segments of this test that a process holds or maps: their memory lives as long as one of these."""
    maps = Path(f"/proc/{pid}/maps").read_text().count(MARK)
    return maps + sum(MARK in name for name in descriptors(pid))


def child(kept: Kept, rank: int, die_early: bool) -> None:
    """Make a segment, hand it over, write into it; perhaps be killed on the way."""
    fd = os.memfd_create(MARK)
    os.ftruncate(fd, SIZE)
    if die_early:
        os.kill(os.getpid(), signal.SIGKILL)
    address = native.map_fd(fd, SIZE)
    kept.client.put(rank, "arena", 0, fd)
    native.store64(address + SIZE - 8, rank + 1)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_thousand_rounds_leave_nothing(kept: Kept) -> None:
    pick = random.Random(7)
    kept.client.get(0, "arena")
    mine = len(os.listdir("/proc/self/fd"))
    theirs = wait_for(lambda: len(descriptors(kept.pid)), "the fd store's descriptors")
    for number in range(ROUNDS):
        rank = pick.randrange(4)
        early = pick.random() < 0.2
        pid = os.fork()
        if pid == 0:
            try:
                child(kept, rank, early)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        fd = kept.client.get(rank, "arena")
        if fd is not None:
            address = native.map_fd(fd, SIZE)
            os.close(fd)
            if not early:
                assert native.load64(address + SIZE - 8) == rank + 1, f"round {number}"
            native.unmap(address, SIZE)
        if pick.random() < 0.3:
            kept.client.forget(rank, "arena")
    for rank in range(4):
        kept.client.forget(rank, "arena")
    wait_for(lambda: len(descriptors(kept.pid)) <= theirs, "the fd store to close its connections")
    assert len(os.listdir("/proc/self/fd")) == mine
    assert marked(os.getpid()) == 0 and marked(kept.pid) == 0
