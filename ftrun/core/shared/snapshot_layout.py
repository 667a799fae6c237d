"""The layout of one rank's host snapshots, which its worker writes, another node copies and a replacement reads.

The segment has two halves. Each begins with its head: the step + 1, written last (0 = it holds no whole snapshot), and length and checksum
of the facts. The facts, JSON, lie at FACTS_AT; among them are the places of the pieces, which begin at PIECES_AT. All places count from
the beginning of the half.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ftrun.core import shape

NAME = "snapshot"  # of the segment at the fd store
HALVES = (0, 1)
PAGE = 4096
FACTS_AT = PAGE
PIECES_AT = 1 << 20
_HEAD = struct.Struct("<QQQ")
HEAD_BYTES = _HEAD.size
_FACTS = shape.record({"pieces": shape.mapped(shape.row(shape.whole, shape.whole, shape.whole))})
Range = tuple[int, int]  # place and length


class HalfHead(NamedTuple):
    """The head of a half."""

    seal: int  # step + 1
    length: int
    sum: int

    def pack(self) -> bytes:
        return _HEAD.pack(*self)


def head(data: bytes | bytearray) -> HalfHead:
    return HalfHead(*_HEAD.unpack(data))


def pieces(facts: bytes | bytearray, half: int) -> list[Range]:
    """Return the places of the pieces that `facts` name; `half`: the bytes of a half.

    Raises:
        ValueError: They are no facts of a snapshot.
    """
    found = shape.loads(bytes(facts))
    if not _FACTS(found):
        raise ValueError("no facts of a host snapshot")
    places = [(at, size) for at, size, _ in found["pieces"].values()]
    if any(at < PIECES_AT or size < 0 or at + size > half for at, size in places):
        raise ValueError("a piece of a host snapshot lies outside")
    return places
