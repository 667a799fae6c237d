"""Mirrors: each node keeps the slots of the ranks of the node before it, so that a spare node can take a lost one's place.

Theory of operation. The rank that speaks for a node takes part in an all-reduce at each gate (ftrun/worker/step/across.py). Before it
does, it sends what is new in the slots of its node's ranks to the next node, in a ring, and writes what it gets into segments that the
fd store of its node holds. So when the all-reduce is complete anywhere, every node has stored the slots of its predecessor: the
receipt that the protocol asks for before a gate opens (docs/design/protocol.md) costs no message of its own.

A mirror has the layout of the original, and what is sent are parts of it: offset, size, bytes. In the middle of a step a mirror is as of
the last gate, like the slots of a rank that died in its update there. All nodes send buffers of one size. A node that needs more
room says so and sends nothing; the all-reduce tells all the greatest need, and they send again with that room.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ftrun import native
from ftrun.core.errors import WorkerError
from ftrun.worker.comm import among_nodes
from ftrun.worker.comm.process_group import SwapGroup
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.arena import Arena
from ftrun.worker.repair.handover import fetch
from ftrun.worker.repair.recovery_points import BUFFERS, GATE, LENGTH, MOST_BUFFERS, Slots

_ROOM = 1 << 16  # bytes of a buffer at first
_GATES = 16  # what they needed decides how large the buffers are
_SIZE = struct.Struct("<Q")  # bytes that follow; more than there is room for: they do not
_PART = struct.Struct("<QQQ")  # rank, offset and size
_HEAD = struct.Struct("<QQQ")  # of a slot: tag, length and checksum


@dataclass
class _Own:
    """The memory of a rank of this node. `sent`: how far each of its logs was sent."""

    slots: Slots
    arena: Arena
    sent: dict[int, int] = field(default_factory=dict)

    def news(self) -> Iterator[tuple[int, bytes | memoryview]]:
        """Yield what is new in the slots, and the buffers in host memory as a slot: places and bytes, the tags last.

        Buffers on a GPU are in a slot already: only their rank reads them.
        """
        view = self.slots.segment.view
        for offset, size in self.slots.grown(self.sent):
            yield offset, view(offset, size)
        offset, size = self.arena.volatile
        if size <= MOST_BUFFERS:
            data, place = self.arena.segment.view(offset, size), Slots.place(BUFFERS)
            head = _HEAD.pack(self.slots.tag(GATE) + 1, size, native.checksum(self.arena.segment.address + offset, size))
            yield place + native.SLOT_HEADER, data
            yield place, head
        for offset, size in self.slots.tags():
            yield offset, view(offset, size)


class Mirrors:
    """The part of a rank that speaks for its node, in one world."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._own: dict[int, _Own] = {}
        self._kept: dict[int, Slots] = {}
        self._data = b""  # what is sent at this gate
        self._room = _ROOM  # bytes of a buffer, the same on every node
        self._needs: deque[int] = deque([0] * _GATES, _GATES)  # the most that a node needed at the last gates

    def collect(self) -> int:
        """Gather what is new in the slots of this node's ranks. Return how much room it needs."""
        parts = bytearray()
        for rank in sorted(self._context.world.here if self._context.world is not None else ()):
            own = self._own.get(rank) or self._map(rank)
            for offset, data in own.news() if own is not None else ():
                parts += _PART.pack(rank, offset, len(data))
                parts += data
        self._data = bytes(parts)
        return _SIZE.size + len(parts)

    def _map(self, rank: int) -> _Own | None:
        """Map a rank's memory; None: there is no fd store now."""
        slots, arena = (fetch(self._context, rank, name) for name in ("slots", "arena"))
        if slots is None or arena is None:
            return None
        self._own[rank] = _Own(Slots(slots), Arena(arena))
        return self._own[rank]

    def exchange(self, nodes: SwapGroup) -> bool:
        """Send what was gathered to the next node, and keep what the one before sends. False: the world was stopped.

        Raises:
            WorkerError: It sent what is no part of a rank's slots.
        """
        mine = torch.zeros(self._room, dtype=torch.uint8, device="cpu")
        sent = memoryview(mine.numpy())
        _SIZE.pack_into(sent, 0, len(self._data))
        if _SIZE.size + len(self._data) <= self._room:
            sent[_SIZE.size : _SIZE.size + len(self._data)] = self._data
        found = among_nodes.passed_on(nodes, mine)
        if found is None:
            return False
        self._keep(memoryview(found.numpy()))
        return True

    def again(self, need: int) -> bool:
        """Must all nodes send again? `need`: the most room that one of them needs. If not, decide about the buffers of the next gate."""
        if need > self._room:
            self._room = need
            return True
        self._data = b""
        self._needs.append(need)
        usual = sorted(self._needs)[-2]  # one large gate makes no other one dear
        self._room = max(usual + usual // 2, _ROOM)
        return False

    def _keep(self, found: memoryview) -> None:
        (size,) = _SIZE.unpack_from(found)
        at, end = _SIZE.size, _SIZE.size + size
        if end > len(found):
            return  # it had too little room
        begun: set[int] = set()
        while at < end:
            rank, offset, length = _PART.unpack_from(found, at)
            at += _PART.size
            if at + length > end or offset + length > LENGTH:
                raise WorkerError("another node sent what is no part of a rank's slots")
            slots = self._mirror(rank)
            if rank not in begun:
                begun.add(rank)
                slots.forget_steps()  # until their tags come, last
            slots.segment.view(offset, length)[:] = found[at : at + length]
            at += length

    def _mirror(self, rank: int) -> Slots:
        if rank not in self._kept:
            context, segment = self._context, fetch(self._context, rank, "slots")
            self._kept[rank] = Slots(segment) if segment is not None else Slots.create(rank)
            context.lent.hand_on(rank, "slots", context.cell.index, self._kept[rank].segment.fd)
        return self._kept[rank]
