"""The arena holds a rank's weights: a segment with a committed zone (parameters, optimizer state) and a volatile one (buffers).

Tensors on a GPU lie in device memory with the same two zones; the segment then describes that memory.

The seal names the step for which the committed zone is whole; it is OPEN from before the first write of an update (or a
restore) until after the last. The manifest (JSON in the segment) records the layout, so that a replacement can map it.

The zones have different writers: only the update writes the committed zone, so one word vouches for all of it; a forward writes
buffers at any time, so each step saves them at its start and a repair puts them back. A spare that built the tensors of an adoption
ahead was tried and removed: without it, adopting 1 GB takes 4 ms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ftrun import native
from ftrun.core.errors import DeviceError, UsageError, WorkerError
from ftrun.native.transfer import Extent
from ftrun.worker.memory.gpu_memory import DeviceMemory, FarDevice, gpu_of
from ftrun.worker.memory.segment import Segment, room_for

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
    on_gpu: bool = False

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
            self.on_gpu,
        ]

    @staticmethod
    def from_json(raw: list[Any]) -> Entry:
        return Entry(raw[0], raw[1], raw[2], tuple(raw[3]), tuple(raw[4]), *raw[5:])


@dataclass
class Manifest:
    """The layout, and the facts that a replacement needs and no tensor holds."""

    entries: list[Entry] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return json.dumps({"entries": [e.to_json() for e in self.entries], "facts": self.facts}).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Manifest:
        raw = json.loads(data)
        return Manifest([Entry.from_json(e) for e in raw["entries"]], raw["facts"])


class Arena:
    """The arena of one rank, mapped by its owner, its replacement or a rank that copies from it."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.memory: DeviceMemory | None = None
        self.far: FarDevice | None = None  # of another node's arena
        self._seal_at = segment.address + _SEAL
        self._volatile_at = segment.length // 2
        self._manifest_at = segment.length // 4 * 3

    @classmethod
    def create(cls, rank: int, bytes_now: int, gpu: int | None = None) -> Arena:
        """Create an arena with room for `bytes_now` bytes of parameters and buffers and their optimizer's state.

        `gpu`: the device that holds a part of it.

        Raises:
            PlatformError
            DeviceError
        """
        # the optimizer creates its state in its first update, and a segment that others map cannot grow: address space costs nothing,
        # and the kernel allocates pages as they are written
        length = max(1 << 36, 1 << (64 * bytes_now - 1).bit_length())
        arena = cls(Segment.create(f"arena-{rank}", length))
        arena.segment.store(0, _MAGIC)
        arena.segment.store(_SEAL, 0)
        arena.segment.store(_COMMITTED_END, _PAGE)
        arena.segment.store(_VOLATILE_END, arena._volatile_at)
        if gpu is not None:
            arena.memory = DeviceMemory.create(arena.segment, gpu, length)
        return arena

    @property
    def has_gpu(self) -> bool:
        """Is a part of it on a GPU (mapped here or not)?"""
        return DeviceMemory.used_by(self.segment)

    def attach_gpu(self, gpu: int, fetch: Callable[[int], int | None], write: bool) -> None:
        """Map the part on a GPU, if there is one, for use by `gpu`; see `DeviceMemory.attach`.

        Raises:
            DeviceError
        """
        if self.has_gpu and self.memory is None:
            self.memory = DeviceMemory.attach(self.segment, gpu, fetch, write)

    # -- seal --------------------------------------------------------------------------------------------------------

    @property
    def seal(self) -> int:
        """Gate number at whose start the committed zone is whole; OPEN (-1) while it is being written.

        The device may lag the host by an update, so the zone is whole only when both have sealed it.
        """
        seal = self.segment.load(_SEAL)
        if self.has_gpu and self.segment.load(DeviceMemory.SEAL_WORD) != seal:
            return OPEN
        return seal - 1

    def open(self) -> None:
        native.store64(self._seal_at, 0)
        if self.memory is not None:
            self.memory.stamp_seal(0)

    def sealed(self, step: int) -> None:
        if self.memory is not None:
            self.memory.stamp_seal(step + 1)  # queued behind the update: the device lags the host, and both must seal
        native.store64(self._seal_at, step + 1)

    # -- extent ------------------------------------------------------------------------------------------------------

    @property
    def committed(self) -> tuple[int, int]:
        """(offset, size) of the committed zone in use."""
        return _PAGE, self.segment.load(_COMMITTED_END) - _PAGE

    @property
    def volatile(self) -> tuple[int, int]:
        """(offset, size) of the volatile zone in use."""
        return self._volatile_at, self.segment.load(_VOLATILE_END) - self._volatile_at

    @property
    def head(self) -> tuple[int, int]:
        """(offset, size) of the marks and the lengths of all parts."""
        return 0, _PAGE

    def in_use(self, buffers_only: bool = False) -> list[tuple[int, int]]:
        """Return offset and size of everything that it holds in host memory beside its head."""
        return [self.volatile] if buffers_only else [self.committed, self.volatile, (self._manifest_at, self.manifest_length)]

    def expect(self, zone: str, size: int) -> None:
        """Announce that `size` bytes on the GPU will be reserved in this zone."""
        if self.memory is not None:
            self.memory.expect(zone, size)

    def reserve(self, zone: str, size: int, on_gpu: bool = False) -> int:
        """Reserve `size` fresh bytes in a zone; return their offset.

        Raises:
            DeviceError: The device has too little memory.
            UsageError: The zone is full.
        """
        if on_gpu:
            return self.gpu_part.reserve(zone, size, _ALIGN)
        word, limit = (_COMMITTED_END, self._volatile_at) if zone == "committed" else (_VOLATILE_END, self._manifest_at)
        start = -(-self.segment.load(word) // _ALIGN) * _ALIGN
        if start + size > limit:
            raise UsageError(f"the {zone} state outgrew its arena of {self.segment.length >> 30} GiB")
        self.segment.store(word, start + size)
        return start

    def fill_volatile(self, parts: Sequence[memoryview], step: int) -> None:
        """Write the volatile zone of a new arena, in host memory and on a GPU. `step`: for which it has the copy of the buffers.

        Raises:
            DeviceError
            CudaError
        """
        for on_gpu, data in enumerate(parts):
            at = self.reserve("volatile", len(data), bool(on_gpu))
            if not on_gpu:
                self.segment.view(at, len(data))[:] = data
            elif data:
                self.gpu_part.write(at, bytes(data))
                self.gpu_part.has_shadow(step)

    def shape_committed(self, size: int) -> int:
        """Resize the committed zone to `size` bytes; return its offset. Call it while OPEN.

        Raises:
            UsageError
        """
        if _PAGE + size > self._volatile_at:
            raise UsageError(
                f"a committed state of {size} bytes does not fit an arena of {self.segment.length >> 30} GiB"
            )
        self.segment.store(_COMMITTED_END, _PAGE + size)
        return _PAGE

    @property
    def gpu_part(self) -> DeviceMemory:
        """The part on a GPU.

        Raises:
            WorkerError: None is mapped here.
        """
        if self.memory is None:
            raise WorkerError("this arena has no memory on a GPU")
        return self.memory

    @property
    def gpu_source(self) -> DeviceMemory | FarDevice:
        """The part on a GPU, of this node or of another one.

        Raises:
            WorkerError: None is mapped here.
        """
        return self.far or self.gpu_part

    def copy_gpu_from(self, source: Arena, zone: str, copy: Callable[[list[Extent], list[Extent], int], object]) -> int:
        """Copy a zone's part on a GPU from a replica's arena; return the bytes moved.

        `copy` moves and checks extents that the device reaches; the driver copies what it does not reach, and what comes from another node.

        Raises:
            DeviceError
            CudaError
        """
        there = source.memory or source.far
        if there is None:
            return 0
        here = self.gpu_part
        start, filled = there.extent(zone)
        missing = filled - here.extent(zone)[1]
        if missing > 0:
            here.expect(zone, missing)
            here.reserve(zone, missing, 1)
        here.settle()
        if isinstance(there, FarDevice):
            there.give(here, start, filled)
        elif there.reachable:
            copy([(here.base + start, filled)], [(there.base + start, filled)], here.ordinal)
        else:
            there.give(here, start, filled)
            if here.checksum(start, filled) != there.checksum(start, filled):
                raise DeviceError("a copy from another rank's device memory does not match its checksum")
        return filled

    def copy_entry(self, entry: Entry, source: Arena) -> None:
        """Copy one tensor from a replica's arena."""
        if entry.on_gpu:
            source.gpu_source.give(self.gpu_part, entry.offset, entry.block)
        else:
            native.copy(self.segment.address + entry.offset, source.segment.address + entry.offset, entry.block)

    def checksum_of(self, names: list[str], manifest: Manifest) -> int:
        """Checksum the named tensors, laid out as `manifest` says."""
        value = 0
        for entry in manifest.entries:
            if entry.name in names:
                value = self.checksum(entry, value)
        return value

    def checksum(self, entry: Entry, seed: int = 0) -> int:
        """`native.checksum` of a tensor's bytes, computed where they are."""
        if entry.on_gpu:
            return self.gpu_source.checksum(entry.offset, entry.block, seed)
        return native.checksum(self.segment.address + entry.offset, entry.block, seed)

    def read(self, entry: Entry) -> bytes:
        """A tensor's bytes."""
        if entry.on_gpu:
            return self.gpu_part.read(entry.offset, entry.block)
        return bytes(self.segment.view(entry.offset, entry.block))

    def write(self, entry: Entry, data: bytes) -> None:
        """Overwrite a tensor's bytes."""
        if entry.on_gpu:
            self.gpu_part.write(entry.offset, data)
        else:
            self.segment.view(entry.offset, entry.block)[:] = data

    # -- manifest ----------------------------------------------------------------------------------------------------

    def write_manifest(self, manifest: Manifest) -> None:
        data = manifest.to_bytes()
        self.segment.store(_MANIFEST_LENGTH, 0)  # a spare may be reading it, to map this rank ahead
        self.segment.view(self._manifest_at, len(data))[:] = data
        self.segment.store(_MANIFEST_LENGTH, len(data))

    def read_manifest(self) -> Manifest:
        return Manifest.from_bytes(bytes(self.segment.view(self._manifest_at, self.manifest_length)))

    @property
    def manifest_length(self) -> int:
        """Bytes of the manifest; 0 while it is being written."""
        return self.segment.load(_MANIFEST_LENGTH)

    # -- tensors -----------------------------------------------------------------------------------------------------

    def tensor(self, entry: Entry, blocks: dict[int, torch.Tensor]) -> torch.Tensor:
        """Make a tensor over the entry's bytes. `blocks` shares storages between entries of the same offset."""
        dtype = getattr(torch, entry.dtype)
        place: Segment | DeviceMemory = self.gpu_part if entry.on_gpu else self.segment
        if entry.block == 0:  # it takes no bytes, so the next entry begins at the same offset
            on_gpu = entry.on_gpu and torch.cuda.is_available()
            return torch.empty(entry.shape, dtype=dtype, device=f"cuda:{self.gpu_part.ordinal}" if on_gpu else "cpu")
        key = ~entry.offset if entry.on_gpu else entry.offset
        block = blocks.get(key)
        if block is None:
            block = blocks[key] = place.block(entry.offset, entry.block)
        view = torch.empty(0, dtype=dtype, device=block.device)
        view.set_(block.untyped_storage(), entry.storage_offset, entry.shape, entry.stride)
        return view


def place(
    arena: Arena,
    zone: str,
    tensors: Iterable[tuple[str, torch.Tensor, bool]],
    blocks: dict[int, torch.Tensor],
    roomy: bool = False,
) -> Iterator[tuple[Entry, torch.Tensor]]:
    """Lay tensors (name, tensor, private) out in a zone and copy their values; ties and views keep sharing memory.

    Yields (entry, tensor over the arena) in order. The caller re-points each at once, so that a model is not on its device
    twice. `roomy`: the caller has checked for room.
    """
    items = list(tensors)
    storages: dict[int, int] = {}
    gpus = {t.untyped_storage().data_ptr(): arena.memory is not None and gpu_of(t) is not None for _, t, _ in items}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t, _ in items}
    what = "parameters and optimizer state" if zone == "committed" else "buffers"
    in_host = sum(size for key, size in sizes.items() if not gpus[key])
    with room_for(0 if roomy else in_host, f"moving {what} into memory that outlives the worker"):
        for name, tensor, private in items:
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            on_gpu = gpus[key] if key else arena.memory is not None and gpu_of(tensor) is not None
            dense = tensor.numel() * tensor.element_size()
            if storage.nbytes() > 2 * dense + _PAGE:  # a small view of a large storage: copy only the view
                key, size, offset_in, stride = -id(tensor), dense, 0, _dense(tensor)
            else:
                size, offset_in, stride = storage.nbytes(), tensor.storage_offset(), tensor.stride()
            fresh = key not in storages or not key
            if fresh:
                storages[key] = arena.reserve(zone, size, on_gpu)
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
                on_gpu,
            )
            view = arena.tensor(entry, blocks)
            with torch.no_grad():
                view.copy_(tensor.detach())
            yield entry, view


def _dense(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(torch.empty(tensor.shape, device="meta").stride())
