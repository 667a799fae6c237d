"""What each node sends to the next one at a gate: the buffers in which it goes, and what a mirror holds of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftrun.core.errors import WorkerError
from ftrun.core.shared.board import Board
from ftrun.core.shared.world import AllNodes, Place, World
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.arena import Arena
from ftrun.worker.repair import mirrors
from ftrun.worker.repair.mirrors import Mirrors
from ftrun.worker.repair.recovery_points import BUFFERS, END, GATE, LATE, MOST_BUFFERS, ON_GPU, START, Slots

NODES: Any = None


class Node:
    """One of two nodes, with one rank; `memory` has what its fd store has."""

    def __init__(self, folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = number
        self.slots, self.arena = Slots.create(number), Arena.create(number, 1000)
        self.memory = {(number, "slots"): self.slots.segment, (number, "arena"): self.arena.segment}
        Board.create(folder / "board", 1)
        self.context = Context(folder, 0)
        span = AllNodes(2, (0, 1), number, ("127.0.0.1", "127.0.0.1"), "round/0", mirrored=True)
        self.context.world = World(1, 0, (Place(number, 0, 0),), "", 0, span=span)
        monkeypatch.setattr(self.context.lent, "hand_on", lambda rank, name, cell, fd: self.memory.setdefault((rank, name), fd) and True)
        self.mirrors = Mirrors(self.context)

    def write(self, step: int, size: int = 100) -> None:
        for slot in (START, GATE, END):
            self.slots.write(slot, step, bytes([step % 256, slot]) * size)


class Ring:
    """Both nodes, which send to each other."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("a", "b"):
            (folder / name).mkdir()
        self.nodes = [Node(folder / name, number, monkeypatch) for number, name in enumerate(("a", "b"))]
        self.sizes: list[int] = []
        self._patch = monkeypatch

    def gate(self) -> None:
        """Pass a gate: what each sends goes round until all had room."""
        needs = [self._of(node, lambda one: one.mirrors.collect()) for node in self.nodes]
        while True:
            sent: list[torch.Tensor] = []
            self._patch.setattr(mirrors.among_nodes, "passed_on", lambda _, mine, to=sent: to.append(mine) or torch.zeros_like(mine))
            for node in self.nodes:
                assert node.mirrors.exchange(NODES)
            assert len({len(one) for one in sent}) == 1, "all buffers have one size"
            self.sizes.append(len(sent[0]))
            for node, other in zip(self.nodes, reversed(sent), strict=True):
                self._of(node, lambda one, data=other: one.mirrors._keep(memoryview(data.numpy())))  # type: ignore[misc]
            again = [node.mirrors.again(max(needs)) for node in self.nodes]
            assert len(set(again)) == 1
            if not again[0]:
                return

    def mirror(self, rank: int) -> Slots:
        return self.nodes[1 - rank].mirrors._kept[rank]

    def _of(self, node: Node, call: Any) -> Any:
        self._patch.setattr(mirrors, "fetch", lambda context, rank, name: node.memory.get((rank, name)))
        return call(node)


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ring:
    return Ring(tmp_path, monkeypatch)


def test_a_mirror_holds_the_slots_of_the_last_gate(ring: Ring) -> None:
    for step in (0, 1, 2):
        for node in ring.nodes:
            node.write(step)
        ring.gate()
        for node in ring.nodes:
            found = ring.mirror(node.rank)
            for slot in (START, GATE, END):
                assert found.tag(slot) == step and bytes(found.sound(slot)) == bytes(node.slots.sound(slot))
            assert found.tag(LATE) == found.tag(ON_GPU) == -1 and found.tag(BUFFERS) == step and not found.sound(BUFFERS)


def test_gradients_of_an_earlier_step_are_not_sent(ring: Ring) -> None:
    one = ring.nodes[0]
    for step, there in ((0, 0), (1, -1)):
        for node in ring.nodes:
            node.write(step)
        if step == 0:
            one.slots.write(LATE, 0, b"gradients")
        ring.gate()
        assert ring.mirror(0).tag(LATE) == there


def test_logs_are_sent_once(ring: Ring) -> None:
    one = ring.nodes[0]
    one.write(0)
    one.slots.log.append(b"first")
    one.slots.histories[3].append(b"a" * 5000)
    ring.gate()
    needed = one.mirrors.collect()
    assert needed < 5000
    one.slots.histories[3].append(b"b")
    ring.gate()
    assert [bytes(r) for r in ring.mirror(0).histories[3].records()] == [b"a" * 5000, b"b"]
    assert [bytes(r) for r in ring.mirror(0).log.records()] == [b"first"]


def test_buffers_go_with_them(ring: Ring) -> None:
    one = ring.nodes[0]
    one.write(4)
    at = one.arena.reserve("volatile", 64)
    one.arena.segment.view(at, 64)[:] = bytes(range(64))
    ring.gate()
    assert ring.mirror(0).tag(BUFFERS) == 4 and bytes(ring.mirror(0).sound(BUFFERS))[:64] == bytes(range(64))
    one.arena.reserve("volatile", MOST_BUFFERS)
    one.write(5)
    ring.gate()
    assert ring.mirror(0).tag(GATE) == 5 and ring.mirror(0).tag(BUFFERS) == -1, "too many"


def test_buffers_on_a_gpu_go_as_of_the_same_gate(ring: Ring) -> None:
    one = ring.nodes[0]
    one.write(4)
    one.slots.write(ON_GPU, 4, b"of the device")
    ring.gate()
    assert ring.mirror(0).tag(ON_GPU) == 4 and bytes(ring.mirror(0).sound(ON_GPU)) == b"of the device"
    one.write(5)
    ring.gate()
    assert ring.mirror(0).tag(GATE) == 5 and ring.mirror(0).tag(ON_GPU) == -1, "they are of an earlier gate"


def test_buffers_of_one_size_grow_and_shrink(ring: Ring) -> None:
    room = mirrors._ROOM
    one, other = ring.nodes
    one.write(0, size=room)  # once
    other.write(0)
    ring.gate()
    assert ring.sizes[0] == room and ring.sizes[1] > 6 * room and len(ring.sizes) == 2
    for step in (1, 2):
        one.write(step)
        ring.gate()
    assert ring.sizes[2:] == [room, room]
    for step in (3, 4, 5):  # often
        one.write(step, size=room)
        ring.gate()
        assert bytes(ring.mirror(0).sound(GATE)) == bytes(one.slots.sound(GATE))
    assert len(ring.sizes) == 8 and ring.sizes[-1] > 6 * room, "the third time in some gates nobody sends twice"
    for step in range(6, 6 + mirrors._GATES):
        one.write(step)
        ring.gate()
    assert ring.sizes[-1] == room


def test_a_torn_mirror_has_no_slot(ring: Ring) -> None:
    """What comes is cut off after its first part, as by the death of the rank that writes it."""
    one, other = ring.nodes
    one.write(1)
    ring.gate()
    one.write(2)
    ring._of(one, lambda node: node.mirrors.collect())
    data = one.mirrors._data
    rank, offset, size = mirrors._PART.unpack_from(data)
    first = mirrors._PART.size + size
    torn = data[:first] + mirrors._PART.pack(rank, offset, len(data)) + data[first + mirrors._PART.size :]
    with pytest.raises(WorkerError, match="what is no part of a rank's slots"):
        other.mirrors._keep(memoryview(mirrors._SIZE.pack(len(torn)) + torn))
    found = ring.mirror(0)
    assert {found.tag(slot) for slot in (START, GATE, END)} == {-1}
