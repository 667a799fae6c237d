"""The sealed slots beside a rank's arena: its state at the *start* of a step, the *gate*, the *end* of the body, and more.

A slot stores the gate number for which it holds (start, gate: the step; end: the step after) plus 1, and 0 while it is being
written. A rank overwrites a slot only when the protocol can no longer ask for it, so one copy of each is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ftrun import native
from ftrun.worker.memory import serialization
from ftrun.worker.memory.log import Damaged, Log
from ftrun.worker.memory.segment import Segment

START, GATE, END = 0, 1, 2
LATE = 3  # gradients that a body, as its backward revealed, accumulates on
_LOG = 4  # results of collectives outside the loops
SEALED = 5  # the gradients of a rank without replica, on its arrival at the gate
BUFFERS = 6  # only in a mirror on another node: the zone of the arena that holds the rank's buffers
ON_GPU = 7  # where there are mirrors: that zone's part on a GPU
MOST_BUFFERS = 16 << 20  # bytes of each, with their copy of the step's start: larger ones are a replica's to give
_HISTORIES = 8  # additions to long lists of the script: see variables/histories.py
_ROOM = 1 << 36  # address space for each; the kernel allocates pages as they are written
_HEADER = native.SLOT_HEADER
_TAG, _LENGTH, _SUM = 0, 8, 16
_MOST_HISTORIES = 16
_OF_STEPS = (START, GATE, END, LATE)  # the slots of a step that any replacement may need
_ROOM_OF_HISTORY = 1 << 34
LENGTH = _HISTORIES * _ROOM + _MOST_HISTORIES * _ROOM_OF_HISTORY


class Slots:
    """The slots segment of one rank."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.log = Log(segment, _LOG * _ROOM, _ROOM)  # of results of collectives outside the loops
        begin = _HISTORIES * _ROOM
        places = range(begin, begin + _MOST_HISTORIES * _ROOM_OF_HISTORY, _ROOM_OF_HISTORY)
        self.histories = [Log(segment, at, _ROOM_OF_HISTORY) for at in places]

    @classmethod
    def create(cls, rank: int) -> Slots:
        return cls(Segment.create(f"slots-{rank}", LENGTH))

    def tag(self, slot: int) -> int:
        """Return the gate number that the slot holds for; -1 = nothing whole."""
        return native.load64(self.segment.address + slot * _ROOM + _TAG) - 1

    def write(self, slot: int, tag: int, data: bytes) -> None:
        """Invalidate, copy the data, seal with `tag` (a gate number)."""
        native.slot_write(self.segment.address + slot * _ROOM, data, len(data), tag + 1)

    def write_large(self, slot: int, tag: int, pieces: Sequence[bytes | memoryview]) -> None:
        """Write pieces that are too large to join first."""
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
        """Seal an invalidated slot with `tag`; its content keeps its length."""
        base = self.segment.address + slot * _ROOM
        size = native.load64(base + _LENGTH)
        native.store64(base + _SUM, native.checksum(base + _HEADER, size))
        native.store64(base + _TAG, tag + 1)

    @staticmethod
    def place(slot: int) -> int:
        """Return the offset of a slot's tag, behind which are the length and the checksum of its content."""
        return slot * _ROOM

    def block(self, slot: int, at: int, size: int) -> torch.Tensor:
        """Return a uint8 tensor over a part of a slot's content."""
        return self.segment.block(slot * _ROOM + _HEADER + at, size)

    def invalidate(self, slot: int) -> None:
        native.store64(self.segment.address + slot * _ROOM + _TAG, 0)

    def forget_steps(self) -> None:
        """Invalidate every slot of a step, since the world goes back to an earlier one."""
        for slot in (*_OF_STEPS, SEALED, BUFFERS, ON_GPU):
            self.invalidate(slot)

    def heads(self) -> list[tuple[int, int]]:
        """Return offset and size of the heads of the slots of steps, and of the lengths of the histories."""
        return [(slot * _ROOM, _HEADER) for slot in (START, GATE, END)] + [log.head for log in self.histories]

    def contents(self) -> list[tuple[int, int]]:
        """Return offset and size of what the slots of steps that are whole hold, and of the histories."""
        whole = [slot for slot in (START, GATE, END) if self.tag(slot) >= 0]
        lengths = [(slot * _ROOM + _HEADER, self.segment.load(slot * _ROOM + _LENGTH)) for slot in whole]
        return lengths + [log.content for log in self.histories if log.used]

    def all_heads(self) -> list[tuple[int, int]]:
        """Return offset and size of what `grown` must know beforehand."""
        return [(slot * _ROOM, _HEADER) for slot in (*_OF_STEPS, BUFFERS, ON_GPU)] + [log.head for log in (self.log, *self.histories)]

    def grown(self, sent: dict[int, int]) -> list[tuple[int, int]]:
        """Return offset and size of all that outlives the rank's node, but the tags, which are copied last: what is torn has none.

        `sent`: how far each log was copied before; this moves it on.
        """
        whole = [*self._present(), *([BUFFERS] if self.tag(BUFFERS) >= 0 else ())]
        parts = [(slot * _ROOM + _LENGTH, _HEADER - _LENGTH + self.segment.load(slot * _ROOM + _LENGTH)) for slot in whole]
        for number, log in enumerate((self.log, *self.histories)):
            begin, used = sent.get(number, 0), log.used
            if used == begin:
                continue
            at = begin if begin < used else 0  # it has started over
            parts += [(log.content[0] + at, used - at), log.head]
            sent[number] = used
        return parts

    def tags(self) -> list[tuple[int, int]]:
        """Return offset and size of the tags of the slots that `grown` has."""
        return [(slot * _ROOM + _TAG, 8) for slot in self._present()]

    def _present(self) -> list[int]:
        """Return the slots of steps that are whole, without gradients and buffers of an earlier step."""
        current = {LATE: self.tag(START), ON_GPU: self.tag(GATE)}
        return [s for s in (*_OF_STEPS, ON_GPU) if (tag := self.tag(s)) >= 0 and tag == current.get(s, tag)]

    def data(self, slot: int) -> memoryview:
        """Return the bytes of a slot, unchecked and not copied."""
        base = slot * _ROOM
        return self.segment.view(base + _HEADER, self.segment.load(base + _LENGTH))

    def read(self, slot: int) -> Any:
        """Decode a slot into fresh values.

        Raises:
            Damaged
        """
        return serialization.decode(self.sound(slot))

    def sound(self, slot: int) -> memoryview:
        """Return the sealed bytes of a slot, not copied.

        Raises:
            Damaged: If they do not match the checksum.
        """
        base, data = slot * _ROOM, self.data(slot)
        sum_now = native.checksum(self.segment.address + base + _HEADER, len(data))
        if sum_now != self.segment.load(base + _SUM):
            raise Damaged(f"slot {slot} of a rank does not match its checksum: its memory was overwritten")
        return data
