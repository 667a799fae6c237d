"""Where a rank's weights live: a segment with a committed zone (parameters, optimizer state) and a volatile one (buffers).

The seal says for which step the committed zone is whole; it is OPEN from before the first write of an update (or a
restore) until after the last. The manifest (JSON in the segment) says what lies where, so that a replacement can map it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ftrun.core.errors import UsageError
from ftrun.worker.segment import Segment, room_for

_MAGIC = 0x414E4552414E5254
_SEAL, _COMMITTED_END, _VOLATILE_END, _MANIFEST_LENGTH = 8, 16, 24, 32
_PAGE = 4096
_ALIGN = 64
OPEN = -1


@dataclass
class Entry:
    """One tensor: `block` bytes at `offset` are its storage (shared by entries with the same offset)."""

    name: str
    zone: str  # "committed" or "volatile"
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    offset: int
    block: int
    private: bool = False  # not the same on every replica (left out of DDP's synchronization)

    def to_json(self) -> list[Any]:
        return [
            self.name,
            self.zone,
            self.dtype,
            list(self.shape),
            list(self.stride),
            self.storage_offset,
            self.offset,
            self.block,
            self.private,
        ]

    @staticmethod
    def from_json(raw: list[Any]) -> Entry:
        return Entry(raw[0], raw[1], raw[2], tuple(raw[3]), tuple(raw[4]), *raw[5:])


@dataclass
class Manifest:
    """The layout, and what else a replacement must know that no tensor holds."""

    entries: list[Entry] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return json.dumps({"entries": [e.to_json() for e in self.entries], "facts": self.facts}).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Manifest:
        raw = json.loads(data)
        return Manifest([Entry.from_json(e) for e in raw["entries"]], raw["facts"])

    def layout_hash(self, zone_prefixes: tuple[str, ...] = ("param.", "buffer.")) -> str:
        """Hash of names, types and shapes of parameters and buffers: equal on ranks that can stand in for each other."""
        rows = [(e.name, e.dtype, e.shape) for e in self.entries if e.name.startswith(zone_prefixes)]
        return hashlib.sha256(repr(sorted(rows)).encode()).hexdigest()


class Arena:
    """The arena segment of one rank, mapped here (by its owner, by its replacement, by a rank that copies from it)."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._volatile_at = segment.length // 2
        self._manifest_at = segment.length // 4 * 3

    @classmethod
    def create(cls, rank: int, bytes_now: int) -> Arena:
        """A new arena with room for `bytes_now` bytes of parameters and buffers and their optimizer's state."""
        length = max(1 << 36, 1 << (64 * bytes_now - 1).bit_length())
        arena = cls(Segment.create(f"arena-{rank}", length))
        arena.segment.store(0, _MAGIC)
        arena.segment.store(_SEAL, 0)
        arena.segment.store(_COMMITTED_END, _PAGE)
        arena.segment.store(_VOLATILE_END, arena._volatile_at)
        return arena

    # -- seal --------------------------------------------------------------------------------------------------------

    @property
    def seal(self) -> int:
        """Gate number as of whose start the committed zone is whole; OPEN (-1) while it is being written."""
        return self.segment.load(_SEAL) - 1

    def open(self) -> None:
        self.segment.store(_SEAL, 0)

    def sealed(self, step: int) -> None:
        self.segment.store(_SEAL, step + 1)

    # -- extent ------------------------------------------------------------------------------------------------------

    @property
    def committed(self) -> tuple[int, int]:
        """(offset, size) of the committed zone in use."""
        return _PAGE, self.segment.load(_COMMITTED_END) - _PAGE

    @property
    def volatile(self) -> tuple[int, int]:
        """(offset, size) of the volatile zone in use."""
        return self._volatile_at, self.segment.load(_VOLATILE_END) - self._volatile_at

    def reserve(self, zone: str, size: int) -> int:
        """Offset of `size` fresh bytes in a zone. Errors: DeviceError when memory is too small, UsageError when full."""
        word, limit = (_COMMITTED_END, self._volatile_at) if zone == "committed" else (_VOLATILE_END, self._manifest_at)
        start = -(-self.segment.load(word) // _ALIGN) * _ALIGN
        if start + size > limit:
            raise UsageError(f"the {zone} state outgrew its arena of {self.segment.length >> 30} GiB")
        self.segment.store(word, start + size)
        return start

    def shape_committed(self, size: int) -> int:
        """The committed zone is to be `size` bytes, whatever it was; its offset. Call while OPEN. Errors: UsageError."""
        if _PAGE + size > self._volatile_at:
            raise UsageError(
                f"a committed state of {size} bytes does not fit an arena of {self.segment.length >> 30} GiB"
            )
        self.segment.store(_COMMITTED_END, _PAGE + size)
        return _PAGE

    # -- manifest ----------------------------------------------------------------------------------------------------

    def write_manifest(self, manifest: Manifest) -> None:
        data = manifest.to_bytes()
        self.segment.store(_MANIFEST_LENGTH, 0)
        self.segment.view(self._manifest_at, len(data))[:] = data
        self.segment.store(_MANIFEST_LENGTH, len(data))

    def read_manifest(self) -> Manifest:
        length = self.segment.load(_MANIFEST_LENGTH)
        return Manifest.from_bytes(bytes(self.segment.view(self._manifest_at, length)))

    # -- tensors -----------------------------------------------------------------------------------------------------

    def tensor(self, entry: Entry, blocks: dict[int, torch.Tensor]) -> torch.Tensor:
        """A tensor over the entry's bytes. `blocks` shares storages between entries of the same offset."""
        dtype = getattr(torch, entry.dtype)
        block = blocks.get(entry.offset)
        if block is None:
            size = max(entry.block, 1)
            block = blocks[entry.offset] = self.segment.block(entry.offset, size)
        if entry.block == 0:
            return torch.empty(entry.shape, dtype=dtype)
        view = torch.empty(0, dtype=dtype)
        view.set_(block.untyped_storage(), entry.storage_offset, entry.shape, entry.stride)
        return view


def place(
    arena: Arena, zone: str, tensors: Iterable[tuple[str, torch.Tensor, bool]], blocks: dict[int, torch.Tensor]
) -> list[tuple[Entry, torch.Tensor]]:
    """Lay tensors (name, tensor, private) out in a zone and copy their values; ties and views keep sharing memory.

    Returns (entry, tensor over the arena) in order; nothing is re-pointed yet.
    """
    items = list(tensors)
    storages: dict[int, int] = {}
    total = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t, _ in items}.values())
    placed = []
    what = "parameters and optimizer state" if zone == "committed" else "buffers"
    with room_for(total, f"moving {what} into memory that outlives the worker"):
        for name, tensor, private in items:
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            dense = tensor.numel() * tensor.element_size()
            if storage.nbytes() > 2 * dense + _PAGE:  # a small view of something large: take only what is used
                key, size, offset_in, stride = -id(tensor), dense, 0, _dense(tensor)
            else:
                size, offset_in, stride = storage.nbytes(), tensor.storage_offset(), tensor.stride()
            fresh = key not in storages or not key
            if fresh:
                storages[key] = arena.reserve(zone, size)
            entry = Entry(
                name,
                zone,
                str(tensor.dtype)[6:],
                tuple(tensor.shape),
                tuple(stride),
                offset_in,
                storages[key],
                size,
                private,
            )
            view = arena.tensor(entry, blocks)
            with torch.no_grad():
                view.copy_(tensor.detach())
            placed.append((entry, view))
    return placed


def _dense(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(torch.empty(tensor.shape, device="meta").stride())
