"""A thousand segments are made, kept, mapped and dropped, by processes that are killed at any moment: nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftrun import native
from ftrun.core import paths
from ftrun.core.shared import lease, wire
from ftrun.core.shared.board import Board, F, Head
from ftrun.core.shared.handle import Handle, Kind
from ftrun.helpers.fd_store import FdStore
from ftrun.host.services import services
from ftrun.worker.link.fd_store import FdStoreClient
from tests.conftest import wait_for

ROUNDS = 1000
SIZE = 1 << 20
MARK = "ftrun-round"


class Kept:
    """A real fd store process."""

    def __init__(self, run_dir: Path) -> None:
        self.board = Board.create(run_dir / paths.BOARD, 4)
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


@pytest.mark.parametrize("op", ["reads", "forget"])
def test_a_worker_that_dies_behind_its_request_ends_nothing(kept: Kept, op: str, tmp_path: Path) -> None:
    """The answer finds nobody; the memory of the others has no other holder."""
    held = os.memfd_create(MARK)
    kept.client.put(1, "arena", 0, held)
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(tmp_path / paths.FD_STORE_SOCKET))
            os.kill(kept.pid, signal.SIGSTOP)  # the request lies there when its sender is gone
            more = {"cell": 0, "size": SIZE} if op == "reads" else {"name": "arena"}
            wire.send(sock, {"op": op, "rank": 0, **more}, (held,) if op == "reads" else ())
        os.kill(kept.pid, signal.SIGCONT)
    found = kept.client.get(1, "arena")
    assert found is not None
    os.close(found)
    os.close(held)


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


def _ask(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    socket.send_fds(sock, [data], fds)


_NO_QUESTIONS = (
    b"[]",
    b"null",
    b"7",
    b'"put"',
    b"{",
    b"\xff\xfe",
    b"[" * 60000,
    b"{}",
    b'{"op":[]}',
    b'{"op":{}}',
    b'{"op":"put"}',
    b'{"op":"put","rank":0,"name":"arena","cell":0,"parts":0,"handle":"00"}',
    b'{"op":"put","rank":"x","name":[],"cell":null,"parts":{},"handle":7}',
    b'{"op":"put","rank":0,"name":"arena","cell":0,"parts":0,"handle":"' + b"00" * 64 + b'"}',
    b'{"op":"get","rank":{},"name":"arena"}',
    b'{"op":"get","rank":1e999,"name":"arena"}',
    b'{"op":"forget","rank":"0","name":0}',
    b'{"op":"get","rank":0,"name":"nothing"}',
)


def test_what_is_no_question_ends_only_the_connection_that_it_came_on(kept: Kept) -> None:
    """Whatever frame comes, with as many descriptors as one can carry: the fd store lives, and holds none of them."""
    path = kept.client._path
    sent = os.open(os.devnull, os.O_RDONLY)
    before = len(descriptors(kept.pid))
    for frame in _NO_QUESTIONS:
        for count in (0, 1, 2, 16, 40):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(10)
                sock.connect(os.fspath(path))
                _ask(sock, frame, [sent] * count)
                answered = sock.recv(4096) if not (count == 0 and b"nothing" in frame) else b""
                assert not answered, f"an answer to {frame[:60]!r} with {count} descriptors"
    assert kept.client.get(0, "nothing") is None, "the fd store answers nobody any more"
    wait_for(lambda: len(descriptors(kept.pid)) <= before, "the fd store to close what came with them")
    os.close(sent)


def test_connections_that_say_nothing_keep_nobody_out(kept: Kept) -> None:
    """Nor does one that reads none of its answers."""
    idle = []
    for _ in range(300):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(os.fspath(kept.client._path))
        idle.append(sock)
    deaf = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deaf.connect(os.fspath(kept.client._path))
    deaf.settimeout(0.2)
    with contextlib.suppress(OSError):
        for _ in range(3000):
            deaf.send(b'{"op":"get","rank":0,"name":"nothing"}')
    begin = time.monotonic()
    assert kept.client.get(0, "nothing") is None
    assert time.monotonic() - begin < 4, "it waited for whoever does not read"
    wait_for(lambda: len(descriptors(kept.pid)) < 200, "most of the silent connections to be closed")
    for sock in (*idle, deaf):
        sock.close()


def test_ranks_end_with_the_lease_of_their_node(kept: Kept, tmp_path: Path) -> None:
    """A launcher that is frozen or cut off renews it no more. Spares are left for the time after; so is a rank of a renewed lease."""
    board = kept.board
    workers = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(3)]
    try:
        for cell, (worker, rank) in enumerate(zip(workers, (5, 6, None), strict=True)):
            Board.make_room(tmp_path / paths.BOARD, cell)
            board.cell(cell)[F.PID] = worker.pid
            board.cell(cell)[F.RANK] = 0 if rank is None else rank + 1
        lease.renew(board, 2.0, lease.now())
        kept.client.get(0, "nothing")  # its look at the board
        for _ in range(20):
            time.sleep(0.1)
            lease.renew(board, 2.0, lease.now())
        assert [worker.poll() for worker in workers] == [None] * 3 and not board[Head.FENCED]
        last = time.monotonic()
        codes = [worker.wait(10.0) for worker in workers[:2]]
        assert codes == [-signal.SIGKILL] * 2 and time.monotonic() - last > 1.3
        wait_for(lambda: board[Head.FENCED], "the mark on the board")
        assert workers[2].poll() is None
        assert [board.cell(cell)[F.CUT_OFF] for cell in range(3)] == [1, 1, 0]
        lease.renew(board, 2.0, lease.now())
        board.cell(2)[F.RANK] = 6
        time.sleep(0.3)
        assert workers[2].poll() is None and board[Head.FENCED] == 1
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10.0)


@pytest.mark.parametrize(("name", "given"), [("arena", False), ("slots", True)])
def test_what_a_corrupt_rank_mirrors_of_others_is_sound(name: str, given: bool, tmp_path: Path) -> None:
    """Its own weights are refused to other nodes."""
    board = Board.create(tmp_path / paths.BOARD, 1)
    Board.make_room(tmp_path / paths.BOARD, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    store = FdStore(tmp_path, theirs)
    fd = os.memfd_create(MARK)
    handle = Handle(Kind.HOST, SIZE).pack().hex()
    store._held[(7, name)] = 0, fd, handle
    sound = store._borrow(7, name)
    assert sound is not None
    board.cell(0)[F.CORRUPT] = 1
    borrowed = store._borrow(7, name)
    assert (borrowed is not None) is given
    os.close(fd)
    for one in (sound, borrowed):
        if one is not None:
            one.close()
    ours.close()
    theirs.close()
