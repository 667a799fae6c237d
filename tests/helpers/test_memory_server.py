"""The memory that a node serves to others: who gets it, and what a reader notices."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from ftrun.core.shared import far
from ftrun.helpers.memory_server import Borrowed, HostMemory, MemoryServer
from ftrun.host.nodes.membership.guardian import Guarded, Guardian
from ftrun.worker.memory.arena import Arena, Manifest
from ftrun.worker.repair.far_memory import FarMemory
from ftrun.worker.repair.memories import tags_of
from ftrun.worker.repair.plan import Tags
from ftrun.worker.repair.recovery_points import END, GATE, START, Slots
from tests.conftest import wait_for

SECRET = "of this run"


class Node:
    """A node with the memory of rank 5."""

    def __init__(self) -> None:
        self.arena, self.slots = Arena.create(5, 1 << 20), Slots.create(5)
        self.held = {(5, "arena"): self.arena.segment.fd, (5, "slots"): self.slots.segment.fd}
        self.server = MemoryServer(self.borrow, "127.0.0.1", SECRET)
        self.server.start()
        self.address = ("127.0.0.1", self.server.port)

    def borrow(self, rank: int, name: str) -> Borrowed | None:
        fd = self.held.get((rank, name))
        return None if fd is None else HostMemory(os.dup(fd))

    def fill(self, zone: str, size: int) -> bytes:
        """Random bytes in a zone of the arena, several chunks of them."""
        at = self.arena.reserve(zone, size)
        self.arena.segment.block(at, size).random_(0, 256)
        return bytes(self.arena.segment.view(at, size))


class Pieces(list[int]):
    """Sizes of pieces that came, of transfers of `total` bytes."""

    total = 0

    @contextlib.contextmanager
    def counted(self, total: int) -> Iterator[Callable[[int], None]]:
        self.total += total
        yield self.append


def open_far(address: tuple[str, int], rank: int = 5, secret: str = SECRET) -> FarMemory:
    return FarMemory(address, secret, rank, Pieces().counted)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far, "PATIENCE", 0.3)


@pytest.fixture
def node() -> Iterator[Node]:
    one = Node()
    yield one
    one.server.close()


def test_a_reader_has_the_same_arena_and_slots(node: Node) -> None:
    torch.manual_seed(1)
    weights, buffers = node.fill("committed", 9 << 20), node.fill("volatile", 12345)
    node.arena.write_manifest(Manifest([], {"reducers": [3, 1, 2]}))
    node.arena.sealed(7)
    for slot, tag in ((START, 6), (GATE, 6), (END, 7)):
        node.slots.write(slot, tag, os.urandom(1000 * (slot + 1)))
    node.slots.histories[2].append(b"grown")
    pieces = Pieces()
    there = FarMemory(node.address, SECRET, 5, pieces.counted)
    there.look()
    assert tags_of(there.slots, there.arena) == Tags(7, 6, 6, 7)
    there.read_slots()
    there.read_weights()
    assert pieces.total == sum(pieces) == sum(size for _, size in node.arena.in_use())
    committed, volatile = there.arena.committed, there.arena.volatile
    assert bytes(there.arena.segment.view(*committed))[-len(weights) :] == weights
    assert bytes(there.arena.segment.view(*volatile))[-len(buffers) :] == buffers
    assert there.arena.read_manifest().facts == {"reducers": [3, 1, 2]}
    for slot in (START, GATE, END):
        assert bytes(there.slots.sound(slot)) == bytes(node.slots.sound(slot))
    assert [bytes(record) for record in there.slots.histories[2].records()] == [b"grown"]
    node.arena.open()
    there.look()
    assert there.arena.seal == -1, "each look asks again"
    there.close()


@pytest.mark.parametrize("secret", ["", "of another run"])
def test_who_does_not_know_the_secret_gets_nothing(node: Node, secret: str) -> None:
    with pytest.raises(OSError, match=r"closed|reset"):
        open_far(node.address, secret=secret)


def test_a_rank_that_is_not_there(node: Node) -> None:
    with pytest.raises(OSError, match="no arena of rank 6"):
        open_far(node.address, rank=6)


@pytest.mark.parametrize(
    "asked",
    [
        {"op": "read", "rank": 5, "name": "arena"},
        {"op": "read", "rank": 5, "name": "arena", "ranges": [[1 << 60, 10]]},
        {"op": "read", "rank": 5, "name": "arena", "ranges": [[-1, 10]]},
        {"op": "read", "rank": 5, "name": "arena", "ranges": [[0, -1]]},
        {"op": "size", "rank": "5", "name": "arena"},
        {"op": "drop"},
    ],
    ids=str,
)
def test_nonsense_ends_only_the_connection_that_it_came_on(node: Node, asked: dict[str, object]) -> None:
    with socket.create_connection(node.address, 5.0) as sock:
        sock.sendall(far.answer(SECRET, far.exactly(sock, far.CHALLENGE)))
        far.send(sock, asked)
        sock.settimeout(5.0)
        answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))  # until it hangs up
        assert len(answer) < 64
    open_far(node.address).close()


class Between:
    """Someone on the network, who passes everything on and changes one byte of what the server sends, at `at`, on `times` connections."""

    def __init__(self, to: tuple[str, int], at: int, times: int = 99) -> None:
        self._to, self._at, self._times = to, at, times
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = ("127.0.0.1", int(self._listener.getsockname()[1]))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            ours, _ = self._listener.accept()
            theirs = socket.create_connection(self._to)
            self._times -= 1
            at = self._at if self._times >= 0 else None
            for ends in ((ours, theirs, None), (theirs, ours, at)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, at: int | None) -> None:
        seen = 0
        with to, contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if at is not None and seen <= at < seen + len(data):
                    data[at - seen] ^= 1
                seen += len(data)
                to.sendall(data)


def test_a_byte_that_changed_on_the_way_is_noticed(node: Node) -> None:
    node.fill("committed", 6 << 20)
    there = open_far(Between(node.address, 1 << 20).address)
    with pytest.raises(OSError, match="arena of rank 5 does not match its checksum"):
        there.read_weights()


def test_a_damaged_part_is_read_again_and_the_others_are_not(node: Node) -> None:
    weights, pieces = node.fill("committed", 12 << 20), Pieces()
    there = FarMemory(Between(node.address, 6 << 20, times=1).address, SECRET, 5, pieces.counted)
    there.look()
    there.read_weights()
    assert bytes(there.arena.segment.view(*there.arena.committed))[-len(weights) :] == weights
    assert pieces.total == sum(pieces)


def test_a_slot_that_somebody_forged_is_not_read(node: Node) -> None:
    node.slots.write(END, 7, b"x" * 100_000)
    there = open_far(Between(node.address, 60_000).address)
    with pytest.raises(OSError, match="slots of rank 5 was not sent by a node of this run"):
        there.read_slots()


def test_memory_that_is_gone_is_said_so(node: Node) -> None:
    there = open_far(node.address)
    node.held.clear()
    with pytest.raises(OSError, match="any more"):
        there.look()


class Listener:
    """The launcher of another node, which listens to the guardian of this one."""

    def __init__(self, node: Node) -> None:
        self.ended: list[str] = []
        self.guardian = Guardian(self.ended.append)
        self.guardian.listen(Guarded("b", *node.address, SECRET))

    def wait(self, node: Node) -> None:
        """Wait until it listens."""
        wait_for(lambda: node.server._watching, "the listener")


@pytest.fixture
def listener(node: Node) -> Iterator[Listener]:
    one = Listener(node)
    yield one
    one.guardian.close()


def test_a_guardian_says_that_its_node_has_ended(node: Node, listener: Listener) -> None:
    listener.wait(node)
    assert not listener.ended
    node.server.tell_ended()
    wait_for(lambda: listener.ended == ["b"], "its word")


def test_a_connection_that_only_ends_says_nothing(node: Node, listener: Listener) -> None:
    """A new fd store has another port; the listener is told of it and listens there."""
    listener.wait(node)
    node.server.close()
    wait_for(lambda: not node.server._watching, "the end of the connection")
    following = Node()
    listener.guardian.listen(Guarded("b", *following.address, SECRET))
    listener.wait(following)
    assert not listener.ended
    following.server.tell_ended()
    wait_for(lambda: listener.ended == ["b"], "its word")
    following.server.close()


def test_nobody_listens_any_more(node: Node, listener: Listener) -> None:
    """Whose place in the round is taken is of no interest; its connection takes no room."""
    listener.wait(node)
    listener.guardian.listen(None)
    wait_for(lambda: not node.server._watching, "the end of the connection")
    node.server.tell_ended()
    assert not listener.ended


def test_who_watches_reads_nothing(node: Node) -> None:
    """Its answer to the challenge may have been passed on by a stranger."""
    with socket.create_connection(node.address) as sock:
        sock.settimeout(10.0)
        sock.sendall(far.watcher(SECRET, far.exactly(sock, far.CHALLENGE)))
        far.send(sock, {"op": "size", "rank": 5, "name": "slots"})
        with pytest.raises(ConnectionError):
            far.receive(sock)


def test_only_a_node_of_the_run_can_say_so() -> None:
    """A stranger at the address takes the answer to its challenge, and says that the node has ended."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        heard: list[str] = []
        guardian = Guardian(heard.append)
        guardian.listen(Guarded("b", *stranger.getsockname(), SECRET))
        with stranger.accept()[0] as sock:
            sock.sendall(bytes(far.CHALLENGE))
            far.exactly(sock, far.ANSWER)
            asked = far.receive(sock)
            far.send(sock, {"ended": far.ended("of another run", asked["nonce"])})
            with stranger.accept()[0]:  # it does not believe that, and tries again
                assert not heard
        guardian.close()
