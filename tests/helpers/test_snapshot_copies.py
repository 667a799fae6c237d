"""The copies that a node keeps of the host snapshots of the node before it: real snapshots, a real memory server, a real board."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftrun.core.shared.board import Board, Head
from ftrun.helpers import snapshot_copies
from ftrun.helpers.memory_server import Borrowed, HostMemory, MemoryServer
from ftrun.helpers.snapshot_copies import Copies, NodeBefore, Shelf
from ftrun.worker.memory.arena import Arena
from ftrun.worker.memory.segment import Segment
from ftrun.worker.repair.snapshot_store import Places, Store
from tests.conftest import wait_for

SECRET = "of this run"
RANKS = (4, 5)
SIZE = 5 << 20  # more than one chunk
FACTS = {"world_size": 6, "zone": SIZE, "zone_gpu": 0, "committed": 0, "committed_gpu": 0, "layout": 0}


SILENT = NodeBefore(1, "127.0.0.1", 0, SECRET, range(RANKS[0], RANKS[-1] + 1))


class Before:
    """The node before, with two ranks that take snapshots. `hears(rank)` is called when a part of a rank's is read."""

    def __init__(self, room: int = SIZE + (2 << 20)) -> None:
        self.memory = Segment.create("weights", SIZE)
        self.stores = {rank: Store(Segment.create(f"of-{rank}", 2 * room)) for rank in RANKS}
        self.hears: Callable[[int, int], None] = lambda rank, at: None
        self.server = MemoryServer(self.borrow, "127.0.0.1", SECRET)
        self.server.start()
        self.source = NodeBefore(1, "127.0.0.1", self.server.port, SECRET, range(RANKS[0], RANKS[-1] + 1))

    def borrow(self, rank: int, name: str) -> Borrowed | None:
        store = self.stores.get(rank) if name == "snapshot" else None
        return Heard(rank, store.segment.fd, self) if store is not None else None

    def take(self, step: int, ranks: tuple[int, ...] = RANKS) -> None:
        for rank in ranks:
            self.memory.view(0, 16)[:] = step.to_bytes(8, "little") + rank.to_bytes(8, "little")
            pieces: dict[str, Places | bytes] = {
                "share": Places(Arena(self.memory), []),
                "private": Places(Arena(self.memory), [(0, SIZE)]),
                "slot": b"slot of %d" % step,
            }
            store = self.stores[rank]
            store.write(store.half_for(-1), step, FACTS, pieces)

    def close(self) -> None:
        self.server.close()
        for segment in (self.memory, *(store.segment for store in self.stores.values())):
            segment.close()


class Heard(HostMemory):
    def __init__(self, rank: int, fd: int, node: Before) -> None:
        super().__init__(os.dup(fd))
        self._rank, self._node = rank, node

    def read(self, room: memoryview, at: int) -> int:
        self._node.hears(self._rank, at)
        return super().read(room, at)


class Here:
    """The node that copies."""

    def __init__(self, folder: Path) -> None:
        self.board = Board.create(folder / "board", 1)
        self.held: dict[int, int] = {}
        self.told: list[str] = []
        self.copies = Copies(self.board, Shelf(self.borrow, self.keep), self.told.append)

    def borrow(self, rank: int) -> int | None:
        return os.dup(self.held[rank]) if rank in self.held else None

    def keep(self, rank: int, fd: int) -> None:
        if rank in self.held:
            os.close(self.held[rank])
        self.held[rank] = fd

    def drop(self) -> None:
        for fd in self.held.values():
            os.close(fd)
        self.held.clear()
        self.copies.dropped()

    def done(self, step: int, copies: set[int]) -> None:
        """All ranks of all nodes have the snapshot of `step` now; wait until this node has done what it can, and has these copies."""
        self.board.show_snapshot(step)
        wait_for(lambda: self.board[Head.COPIES_AT] == step + 1, f"the copies of step {step}")
        assert self.board.copies() == copies, self.told

    def check(self, step: int, rank: int) -> None:
        """The copy is a snapshot of that step and rank, whole."""
        store = Store(Segment.attach(os.dup(self.held[rank])))
        record = store.record(step)
        store.check(record)
        assert store.bytes(record.pieces["slot"]) == b"slot of %d" % step
        weights = store.bytes(record.pieces["private"])
        assert weights[:16] == step.to_bytes(8, "little") + rank.to_bytes(8, "little") and len(weights) == SIZE
        store.segment.close()


@pytest.fixture
def before() -> Iterator[Before]:
    node = Before()
    node.memory.view(16, SIZE - 16)[:] = os.urandom(SIZE - 16)
    yield node
    node.close()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    monkeypatch.setattr(snapshot_copies, "_AGAIN", 0.05)
    node = Here(tmp_path)
    yield node
    node.copies.follow(SILENT)
    node.drop()


def test_the_newest_two_snapshots_that_all_ranks_have_are_copied(before: Before, here: Here) -> None:
    here.copies.follow(before.source)
    for step, copies in ((0, {0}), (3, {0, 3}), (6, {3, 6}), (9, {6, 9})):
        before.take(step)
        here.done(step, copies)
        for rank in RANKS:
            for kept in copies:
                here.check(kept, rank)
    assert not here.told


def test_copies_of_steps_from_which_all_went_back_are_forgotten(before: Before, here: Here) -> None:
    here.copies.follow(before.source)
    for step in (3, 6):
        before.take(step)
        here.done(step, {3, 6} if step == 6 else {3})
    here.done(3, {3})
    before.memory.view(100, 1)[0] ^= 1
    for store in before.stores.values():
        store.discard(store.steps()[6])
    before.take(6)
    here.done(6, {3, 6})
    here.check(6, 4)


def test_a_snapshot_that_is_overwritten_while_it_is_copied_is_none(before: Before, here: Here) -> None:
    here.copies.follow(before.source)
    before.take(3)
    here.done(3, {3})
    before.take(6)

    def overwrite(rank: int, at: int) -> None:
        if rank == 5 and at % before.stores[5].segment.length // 2 > 3 << 20:
            before.hears = lambda rank, at: None
            before.take(9, (5,))
            before.take(12, (5,))

    before.hears = overwrite
    here.done(6, {3})
    assert "rank 5" in here.told[0] and here.told[0].startswith("node 1's host snapshots are not copied, and would be lost with it: ")
    for rank in RANKS:
        here.check(3, rank)


@pytest.mark.parametrize("how", ["it is lost", "its memory is not served"])
def test_a_node_that_is_gone_in_the_middle_leaves_the_copies_of_before(how: str, before: Before, here: Here) -> None:
    here.copies.follow(before.source)
    before.take(3)
    here.done(3, {3})
    before.take(6)

    def end(rank: int, at: int) -> None:
        if rank == 5:
            raise OSError("gone")

    if how == "it is lost":
        before.hears = end
    else:
        before.stores.pop(5).segment.close()
    here.done(6, {3})
    before.take(9, (4,))
    here.done(9, {3})  # not over what has copies of all ranks
    for rank in RANKS:
        here.check(3, rank)
    assert len(here.told) == 1


def test_without_room_nobody_is_held_up_and_it_is_said_once(before: Before, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_copies, "memory_left", lambda: 1 << 20)
    here.copies.follow(before.source)
    for step in (3, 6):
        before.take(step)
        here.done(step, set())
    assert here.told == [
        "node 1's host snapshots are not copied, and would be lost with it: the copies of a rank need 10.5 MB more of shared memory, and "
        "the memory limit (cgroup) leaves 1.0 MB"
    ]
    monkeypatch.undo()
    wait_for(lambda: here.board.copies() == {6}, "a copy, when there is room")


def test_what_is_dropped_is_not_kept_by_a_copy_that_was_being_made(before: Before, here: Here) -> None:
    """Another world begins: its steps have the same numbers."""
    before.take(3)
    over: list[bool] = []

    def drop(rank: int, at: int) -> None:
        if rank == 5 and at > 1 << 20:
            before.hears = lambda rank, at: None
            here.board.show_snapshot(-1)
            here.drop()
            over.append(True)

    before.hears = drop
    here.copies.follow(before.source)
    here.board.show_snapshot(3)
    wait_for(lambda: bool(over), "a drop in the middle")
    here.copies.follow(SILENT)
    here.done(6, set())  # so the copy has ended
    assert not here.held
    here.copies.follow(before.source)
    here.done(3, {3})


def test_the_next_node_before_is_copied_anew_and_until_then_the_copies_of_its_predecessor_stay(before: Before, here: Here) -> None:
    here.copies.follow(before.source)
    before.take(3)
    here.done(3, {3})
    spare = Before()
    try:
        here.copies.follow(SILENT)  # the spare node has the seat, and does not serve its memory yet
        assert here.board.copies() == {3}
        here.copies.follow(spare.source)
        assert here.board.copies() == {3}
        spare.take(6)
        here.done(6, {3, 6})
        for rank in RANKS:
            here.check(3, rank)
            here.check(6, rank)
    finally:
        spare.close()


def test_snapshots_of_another_size_take_the_place_of_all_copies_at_once(before: Before, here: Here) -> None:
    """Until the last one is whole, those of all ranks have a step in common."""
    here.copies.follow(before.source)
    before.take(3)
    here.done(3, {3})
    spare = Before(SIZE + (3 << 20))

    def end(rank: int, at: int) -> None:
        if rank == RANKS[-1]:
            raise OSError("gone")

    try:
        here.copies.follow(spare.source)
        spare.take(6)
        spare.hears = end
        here.done(6, {3})
        for rank in RANKS:
            here.check(3, rank)
        spare.hears = lambda rank, at: None
        wait_for(lambda: here.board.copies() == {6}, "the next try")
    finally:
        spare.close()


def test_nobody_waits_for_copies_of_a_node_that_serves_none(here: Here) -> None:
    here.copies.follow(SILENT)
    here.done(6, set())
