"""Packs handles: the 64 bytes that travel beside a segment's descriptor and describe it, equal in every process.

A process that receives a descriptor can refuse a wrong kind, device, size or generation before it maps the memory.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

_FORMAT = struct.Struct("<4sHH16sQQ24x")
_MAGIC = b"ftsg"
_VERSION = 1
BYTES = _FORMAT.size


class Kind(enum.IntEnum):
    """The place of the memory."""

    HOST = 1  # a memfd: map it
    CUDA = 2  # an allocation on a GPU, exported as a descriptor: import it, then map it


@dataclass(frozen=True)
class Handle:
    """A segment's description. `device`: UUID of the GPU (16 bytes, zeros for HOST); `size` in bytes; `generation`: 0 = any."""

    kind: Kind
    size: int
    device: bytes = bytes(16)
    generation: int = 0

    def pack(self) -> bytes:
        """Pack the handle into its 64 bytes."""
        return _FORMAT.pack(_MAGIC, _VERSION, self.kind, self.device, self.size, self.generation)

    @staticmethod
    def unpack(data: bytes) -> Handle:
        """Invert `pack`.

        Raises:
            ValueError: `data` is not a handle of this version.
        """
        if len(data) != BYTES:
            raise ValueError(f"a segment's handle has {BYTES} bytes, not {len(data)}")
        magic, version, kind, device, size, generation = _FORMAT.unpack(data)
        if magic != _MAGIC or version != _VERSION:
            raise ValueError("not the handle of a segment, or that of another ftrun")
        return Handle(Kind(kind), size, device, generation)
