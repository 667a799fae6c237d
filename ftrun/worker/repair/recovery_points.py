"""The three sealed slots beside a rank's arena: its state at *start* of a step, at the *gate*, at the *end* of the body.

A slot's tag is the gate number + 1 for which it holds (start, gate: the step; end: the step after), 0 while it is being
written. A slot is only overwritten when the protocol can no longer ask for it, so one copy of each is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ftrun import native
from ftrun.worker.memory.log import Damaged, Log
from ftrun.worker.memory.segment import Segment
from ftrun.worker.state import serialization

START, GATE, END = 0, 1, 2
LATE = 3  # gradients that turned out, in the middle of a body, to be accumulated on
_LOG = 4  # what collectives outside the loops gave
SEALED = 5  # the gradients of a rank without replica, on its arrival at the gate
_HISTORIES = 6  # what was added to long lists of the script: see state/histories.py
_ROOM = 1 << 36  # address space for each; memory is taken as it is used
_HEADER = native.SLOT_HEADER
_TAG, _LENGTH, _SUM = 0, 8, 16
_MOST_HISTORIES = 16
_ROOM_OF_HISTORY = 1 << 34
LENGTH = _HISTORIES * _ROOM + _MOST_HISTORIES * _ROOM_OF_HISTORY


class Slots:
    """The slots segment of one rank."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.log = Log(segment, _LOG * _ROOM, _ROOM)  # of what collectives outside the loops gave
        begin = _HISTORIES * _ROOM
        places = range(begin, begin + _MOST_HISTORIES * _ROOM_OF_HISTORY, _ROOM_OF_HISTORY)
        self.histories = [Log(segment, at, _ROOM_OF_HISTORY) for at in places]

    @classmethod
    def create(cls, rank: int) -> Slots:
        return cls(Segment.create(f"slots-{rank}", LENGTH))

    def tag(self, slot: int) -> int:
        """Gate number the slot holds for, -1 when it holds nothing whole."""
        return native.load64(self.segment.address + slot * _ROOM + _TAG) - 1

    def write(self, slot: int, tag: int, data: bytes) -> None:
        """Invalidate, copy the data, seal with `tag` (a gate number)."""
        native.slot_write(self.segment.address + slot * _ROOM, data, len(data), tag + 1)

    def write_large(self, slot: int, tag: int, pieces: Sequence[bytes | memoryview]) -> None:
        """As `write`, for pieces that are too large to be joined first."""
        self.invalidate(slot)
        base, size = slot * _ROOM, 0
        for piece in pieces:
            length = memoryview(piece).nbytes
            if length:
                self.segment.view(base + _HEADER + size, length)[:] = piece
            size += length
        self.segment.store(base + _LENGTH, size)
        self.seal(slot, tag)

    def seal(self, slot: int, tag: int) -> None:
        """What lies in an invalidated slot, as long as its content was, holds for `tag`."""
        base = self.segment.address + slot * _ROOM
        size = native.load64(base + _LENGTH)
        native.store64(base + _SUM, native.checksum(base + _HEADER, size))
        native.store64(base + _TAG, tag + 1)

    def block(self, slot: int, at: int, size: int) -> torch.Tensor:
        """uint8 tensor over a part of a slot's content."""
        return self.segment.block(slot * _ROOM + _HEADER + at, size)

    def invalidate(self, slot: int) -> None:
        native.store64(self.segment.address + slot * _ROOM + _TAG, 0)

    def forget_steps(self) -> None:
        """Everything of any step is void: the world goes back to an earlier one."""
        for slot in (START, GATE, END, LATE, SEALED):
            self.invalidate(slot)

    def data(self, slot: int) -> memoryview:
        """The bytes of a slot as they are, not copied."""
        base = slot * _ROOM
        return self.segment.view(base + _HEADER, self.segment.load(base + _LENGTH))

    def read(self, slot: int) -> Any:
        """Decode a slot into fresh values.

        Raises:
            Damaged
        """
        return serialization.decode(self.sound(slot))

    def sound(self, slot: int) -> memoryview:
        """The sealed bytes of a slot, not copied.

        Raises:
            Damaged: When they are not those that were sealed.
        """
        base, data = slot * _ROOM, self.data(slot)
        sum_now = native.checksum(self.segment.address + base + _HEADER, len(data))
        if sum_now != self.segment.load(base + _SUM):
            raise Damaged(f"slot {slot} of a rank does not match its checksum: its memory was overwritten")
        return data
