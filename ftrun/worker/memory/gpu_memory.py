"""Memory on a GPU that outlives the worker: allocations that travel as descriptors, mapped one behind the other.

A rank's arena has one such memory if its model is on a GPU. The arena's host segment records how far it is filled, its allocations,
and the step for which it is whole, so that every process can read them without asking the device.
No call waits for the device unless its docstring says so; writes happen in the order of torch's current stream.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ftrun import native
from ftrun.core.errors import DeviceError, WorkerError
from ftrun.native import cuda
from ftrun.worker.memory import dlpack
from ftrun.worker.memory.segment import Segment, room_for

WAIT = 60.0  # seconds that queued work may take where its result is needed
_LOOK = 0.1  # seconds between two looks at the world while the device works
_GROW = 1 << 30  # bytes to allocate ahead at most, so that torch can free memory between two allocations
_PAGE = 4096
# words of the host segment's first page
_LENGTH, _SEAL, _SHADOW, _COUNT, _UUID = 64, 72, 80, 88, 96
_ENDS = {"committed": 112, "volatile": 120}
_TABLE = 512
_MOST = (_PAGE - _TABLE) // 16


class Chunk(NamedTuple):
    """One allocation: `offset` in the memory and `size` in bytes; `fd` is its descriptor, kept open for the next fd store."""

    offset: int
    size: int
    fd: int


def gpu_of(tensor: torch.Tensor) -> int | None:
    """Ordinal of the GPU whose memory holds a tensor; None = host memory.

    Raises:
        CudaError
    """
    if tensor.device.type == "cuda":
        return int(tensor.device.index)
    if tensor.device.type != "cpu" or not tensor.numel() or not cuda.present():
        return None
    # torch takes device memory that the CPU can read for the CPU's; the driver knows better
    return cuda.owner(tensor.data_ptr())[0]


def stream_of(ordinal: int) -> int:
    """torch's current stream on a device; the legacy stream where torch has no CUDA, or has not used it yet."""
    if not torch.cuda.is_initialized():  # reads a flag, while is_available() asks the driver each time
        return 0
    return int(torch.cuda.current_stream(ordinal).cuda_stream)


def bytes_on_gpu(tensors: Sequence[Any]) -> int:
    """Sum the storages of those tensors that lie on a GPU, in bytes, with room for their alignment."""
    found = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() + 64 for t in tensors if gpu_of(t) is not None
    }
    return sum(found.values())


def allocate(ordinal: int, address: int, size: int, what: str, instead: str) -> int:
    """Allocate memory at `address` of a reserved range; return its descriptor.

    Raises:
        DeviceError: The device gives none; the message has `what` and `instead`.
        CudaError: The device is broken.
    """
    for again in (True, False):
        try:
            return cuda.create(ordinal, address, size)
        except cuda.CudaError as error:
            why = error
        if why.errno == cuda.BROKEN:
            raise why
        if why.errno != errno.ENOMEM:
            raise DeviceError(
                f"{cuda.device(ordinal).name} (device {ordinal}) did not give memory that other processes can map, which {what} "
                f"needs ({why.strerror}); {instead}"
            ) from why
        if not again or not torch.cuda.is_available():
            break
        torch.cuda.empty_cache()  # torch caches freed tensors, among them the originals of those that were moved
    free, total = cuda.room(ordinal)
    raise DeviceError(
        f"no room on device {ordinal}: {what} needs {size >> 20} MiB more, and {free >> 20} of {total >> 20} MiB are free "
        f"({why.strerror}); {instead}"
    ) from why


def ordinal_of(uuid: bytes) -> int | None:
    """Find the GPU with this UUID (16 bytes); None = this process does not see it."""
    for ordinal in range(cuda.device_count()):
        if cuda.device(ordinal).uuid == uuid:
            return ordinal
    return None


def unsettled() -> list[str]:
    """List the settings that the script lacks for kernels to compute the same in every process and on every device."""
    missing = []
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        missing.append("CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment")
    if not torch.are_deterministic_algorithms_enabled():
        missing.append("torch.use_deterministic_algorithms(True)")
    if torch.backends.cudnn.benchmark:
        missing.append("torch.backends.cudnn.benchmark = False")
    return missing


class FarDevice:
    """What an arena of another node has on a GPU. `control`: that arena's host segment.

    `read(offset, size, put)` reads a part over the network, piece by piece, and gives each to `put(offset, piece)`.
    """

    def __init__(self, control: Segment, read: Callable[[int, int, Callable[[int, memoryview], None]], None]) -> None:
        self._control = control
        self._read = read

    def extent(self, zone: str) -> tuple[int, int]:
        """(offset, size) of a zone in use."""
        return _extent(self._control, zone)

    def give(self, to: DeviceMemory, offset: int, size: int) -> None:
        """Copy a part to the same offset there, and compare. Waits for it."""
        self._read(offset, size, to.put)

    def checksum(self, offset: int, size: int, seed: int = 0) -> int:
        """`native.checksum` of the bytes, which it brings here for that.

        Raises:
            DeviceError: There is no room for them.
        """
        with room_for(size, "a copy from another node"):
            data = bytearray(size)

            def put(at: int, piece: memoryview) -> None:
                data[at - offset : at - offset + len(piece)] = piece

            self._read(offset, size, put)
            return native.checksum(ctypes.addressof(ctypes.c_char.from_buffer(data)), size, seed) if size else seed


class DeviceMemory:
    """The part of an arena on GPU `ordinal`. Offsets are the same in every process, addresses are not."""

    SEAL_WORD = _SEAL

    def __init__(self, control: Segment, ordinal: int) -> None:
        self.ordinal = ordinal
        self.control = control
        self.length = control.load(_LENGTH)
        self.chunks: list[Chunk] = []
        self.reachable = True  # may kernels of this device read it? false for memory of a device that is no peer
        self.home = ordinal
        self.on_chunk: Callable[[int, Chunk], None] | None = None  # tells the fd store of a new allocation
        self.base = cuda.reserve(ordinal, self.length)
        self._expected = {"committed": 0, "volatile": 0}
        self._words = 0  # the host segment's first page as the device sees it

    # -- making it ---------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, control: Segment, ordinal: int, length: int) -> DeviceMemory:
        """Create an empty memory whose host words are in `control`.

        Raises:
            DeviceError: The device lacks a feature or room for it.
        """
        facts = cuda.device(ordinal)
        if not facts.vmm or not facts.granularity:
            raise DeviceError(
                f"{facts.name} (device {ordinal}) cannot share its memory between processes (no virtual memory management), "
                "so weights cannot outlive a worker there; virtual GPUs often lack it: use a whole device or a MIG slice of one, "
                "or run the script without protect()"
            )
        if not facts.writes64:
            raise DeviceError(
                f"{facts.name} (device {ordinal}) has no 64-bit stream writes, so a torn update could not be told; "
                "run the script without protect()"
            )
        _need_kernels(ordinal)
        control.view(_UUID, 16)[:] = facts.uuid
        control.store(_LENGTH, length)
        memory = cls(control, ordinal)
        for zone, start in (("committed", 0), ("volatile", length // 2)):
            control.store(_ENDS[zone], start)
        memory._see_words()
        return memory

    @staticmethod
    def device_of(control: Segment) -> bytes:
        """UUID of the GPU that the arena of this host segment has a part on."""
        return bytes(control.view(_UUID, 16))

    @staticmethod
    def used_by(control: Segment) -> bool:
        """Does the arena of this host segment have a part on a GPU?"""
        return control.load(_LENGTH) != 0

    @classmethod
    def attach(cls, control: Segment, ordinal: int, fetch: Callable[[int], int | None], write: bool) -> DeviceMemory:
        """Map memory that another process made, for use by GPU `ordinal`. `fetch` gives the descriptor of the k-th allocation.

        `write`: take it over (its stamps too).

        Raises:
            DeviceError: It cannot be mapped here.
        """
        home = ordinal_of(cls.device_of(control))
        if home is None:
            raise DeviceError("the memory is on a GPU that this worker does not see")
        if write and home != ordinal:
            raise DeviceError(f"the memory is on device {home}, and this worker uses device {ordinal}")
        memory = cls(control, ordinal)
        memory.home = home
        try:
            for index in range(control.load(_COUNT)):
                fd = fetch(index)
                if fd is None:
                    raise DeviceError("the fd store does not have all of it")
                offset, size = (control.load(_TABLE + 16 * index + 8 * k) for k in range(2))
                memory.chunks.append(Chunk(offset, size, fd))
                try:
                    direct = cuda.attach(home, ordinal, fd, memory.base + offset, size)
                except cuda.CudaError:
                    memory.chunks.pop()
                    os.close(fd)
                    raise
                memory.reachable = memory.reachable and direct
            if write:
                memory._see_words()
        except (cuda.CudaError, DeviceError) as error:
            memory.close()
            raise DeviceError(f"device memory of another process cannot be mapped: {error}") from error
        return memory

    def close(self) -> None:
        """Unmap everything; queued work must be done, and no tensor may use it any more."""
        for chunk in self.chunks:
            cuda.unmap(self.base + chunk.offset, chunk.size)
            os.close(chunk.fd)
        self.chunks = []
        if self._words:
            cuda.unregister(self.ordinal, self.control.address)
            self._words = 0
        cuda.free_range(self.base, self.length)

    def _see_words(self) -> None:
        self._words = cuda.register(self.ordinal, self.control.address, _PAGE)

    # -- filling it --------------------------------------------------------------------------------------------------

    def expect(self, zone: str, size: int) -> None:
        """Announce that `size` bytes will be reserved in this zone, so that allocations fit them."""
        self._expected[zone] = size

    def reserve(self, zone: str, size: int, align: int) -> int:
        """Reserve `size` fresh bytes; return their offset.

        Raises:
            DeviceError: The device is full or cannot share its memory.
            CudaError: The device is broken.
        """
        end = self.control.load(_ENDS[zone])
        start = -(-end // align) * align
        self._back(zone, start + size)
        self._expected[zone] = max(0, self._expected[zone] - size)
        self.control.store(_ENDS[zone], start + size)
        return start

    def shape(self, zone: str, size: int) -> int:
        """Resize a zone to `size` bytes; return its offset.

        Raises:
            DeviceError: The device is full.
        """
        start = self._start(zone)
        self._back(zone, start + size)
        self.control.store(_ENDS[zone], start + size)
        return start

    def _back(self, zone: str, end: int) -> None:
        """Back a zone with memory up to offset `end`."""
        backed = max(
            (c.offset + c.size for c in self.chunks if self._zone(c.offset) == zone), default=self._start(zone)
        )
        if end > backed:
            self._grow(zone, backed, end - backed)

    def _start(self, zone: str) -> int:
        return _start(self.control, zone)

    def _zone(self, offset: int) -> str:
        return "committed" if offset < self.length // 2 else "volatile"

    def _grow(self, zone: str, offset: int, missing: int) -> None:
        unit = cuda.device(self.ordinal).granularity
        size = -(-max(missing, min(self._expected[zone], _GROW)) // unit) * unit
        if len(self.chunks) == _MOST or offset + size > self._start(zone) + self.length // 2:
            raise WorkerError(f"the {zone} state on device {self.ordinal} outgrew its arena")
        fd = allocate(
            self.ordinal,
            self.base + offset,
            size,
            "keeping parameters and optimizer state where they outlive the worker",
            "use a smaller model or batch, or run the script without protect()",
        )
        chunk = Chunk(offset, size, fd)
        index = len(self.chunks)
        self.chunks.append(chunk)
        self.control.store(_TABLE + 16 * index, offset)
        self.control.store(_TABLE + 16 * index + 8, size)
        if self.on_chunk is not None:
            self.on_chunk(index, chunk)
        self.control.store(_COUNT, index + 1)

    def extent(self, zone: str) -> tuple[int, int]:
        """(offset, size) of a zone in use."""
        return _extent(self.control, zone)

    # -- stamps, in stream order -------------------------------------------------------------------------------------

    def stamp_seal(self, value: int) -> None:
        """Queue a write of the seal behind everything queued so far."""
        cuda.stamp(self.ordinal, stream_of(self.ordinal), self._words + _SEAL, value)

    @property
    def shadow_step(self) -> int:
        """The step for which the copy of the buffers is whole, -1 = none."""
        return self.control.load(_SHADOW) - 1

    def has_shadow(self, step: int) -> None:
        """Note that the copy of the buffers, as it was written from the host, is whole for `step`."""
        self.control.store(_SHADOW, step + 1)

    def save_shadow(self, step: int, half: int) -> None:
        """Copy the buffers aside, as of the start of `step`."""
        offset, size = self.extent("volatile")
        self._stamp_shadow(0)
        self.copy(offset + half, self.base + offset, min(half, size - half))
        self._stamp_shadow(step + 1)

    def rewind_shadow(self, half: int) -> None:
        """Copy the buffers back."""
        offset, size = self.extent("volatile")
        self.copy(offset, self.base + offset + half, min(half, size - half))

    def _stamp_shadow(self, value: int) -> None:
        cuda.stamp(self.ordinal, stream_of(self.ordinal), self._words + _SHADOW, value)

    # -- bytes -------------------------------------------------------------------------------------------------------

    def copy(self, offset: int, source: int, size: int) -> None:
        """Queue a copy to `offset` from an address on any device or of the host."""
        cuda.copy(self.ordinal, stream_of(self.ordinal), self.base + offset, source, size)

    def finished(self, stop: Callable[[], bool], timeout: float = math.inf) -> bool:
        """Wait until torch's current stream and the work it waits for are done; return False if `stop()` is true first.

        Raises:
            DeviceError: After `timeout` seconds.
            CudaError: That work failed.
        """
        deadline = time.monotonic() + timeout
        while not cuda.sync(self.ordinal, stream_of(self.ordinal), _LOOK):
            if stop():
                return False
            if time.monotonic() > deadline:
                raise DeviceError(f"device {self.ordinal} did not finish its work in {timeout:.0f} s")
        return True

    def settle(self) -> None:
        """Wait until all queued work is done.

        Raises:
            DeviceError: After WAIT seconds.
            CudaError
        """
        self.finished(lambda: False, WAIT)

    def copy_out(self, to: int, places: Sequence[tuple[int, int]]) -> None:
        """Copy (offset, size) after (offset, size) to host memory at `to`; wait for earlier work and for the copies.

        Raises:
            DeviceError: After WAIT seconds.
            CudaError
        """
        self.settle()  # a copy to pageable host memory blocks, without a deadline
        for offset, size in places:
            cuda.copy(self.ordinal, stream_of(self.ordinal), to, self.base + offset, size)
            to += size
        self.settle()

    def copy_in(self, source: int, places: Sequence[tuple[int, int]]) -> None:
        """Copy back from host memory at `source`; wait like `copy_out`."""
        self.settle()
        for offset, size in places:
            self.copy(offset, source, size)
            source += size
        self.settle()

    def read(self, offset: int, size: int) -> bytes:
        """Wait for queued work, then read `size` bytes."""
        data = bytearray(size)
        address = ctypes.addressof((ctypes.c_ubyte * size).from_buffer(data)) if size else 0
        cuda.copy_now(self.ordinal, stream_of(self.ordinal), address, self.base + offset, size, WAIT)
        return bytes(data)

    def give(self, to: DeviceMemory, offset: int, size: int) -> None:
        """Queue a copy of a part to the same offset there."""
        to.copy(offset, self.base + offset, size)

    def put(self, offset: int, piece: memoryview) -> None:
        """Wait for queued work, then write a piece of writable memory, and compare.

        Raises:
            DeviceError: Other bytes are there.
            CudaError
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
        cuda.copy_now(self.ordinal, stream_of(self.ordinal), self.base + offset, address, len(piece), WAIT)
        if self.checksum(offset, len(piece)) != native.checksum(address, len(piece)):
            raise DeviceError(f"what came from another node does not match its checksum on device {self.ordinal}")

    def write(self, offset: int, data: bytes) -> None:
        """Wait for queued work, then write `data`."""
        held = ctypes.create_string_buffer(data, len(data))
        cuda.copy_now(
            self.ordinal, stream_of(self.ordinal), self.base + offset, ctypes.addressof(held), len(data), WAIT
        )

    def checksum(self, offset: int, size: int, seed: int = 0) -> int:
        """Compute `native.checksum` of the bytes on this device, or on theirs if it cannot reach them; wait for it."""
        device = self.ordinal if self.reachable else self.home
        return cuda.checksum(device, stream_of(device), self.base + offset, size, seed, WAIT)

    # -- tensors -----------------------------------------------------------------------------------------------------

    def block(self, offset: int, size: int) -> torch.Tensor:
        """uint8 tensor over [offset, offset + size) with a storage of its own."""
        _, host = cuda.owner(self.base + offset)
        return dlpack.tensor(self.base + offset, size, None if host else self.ordinal)


def _start(control: Segment, zone: str) -> int:
    return 0 if zone == "committed" else control.load(_LENGTH) // 2


def zones_of(control: Segment, buffers_only: bool = False) -> list[tuple[int, int]]:
    """(offset, size) of what is in use of the memory of an arena on a GPU, whose host segment is `control`."""
    return [_extent(control, zone) for zone in ("committed", "volatile")[buffers_only:]]


def _extent(control: Segment, zone: str) -> tuple[int, int]:
    start = _start(control, zone)
    return start, control.load(_ENDS[zone]) - start


def _need_kernels(ordinal: int) -> None:
    try:
        cuda.load_kernels(ordinal)
    except cuda.CudaError as error:
        if error.errno == errno.ENOMEM:
            free, total = cuda.room(ordinal)
            raise DeviceError(
                f"no room on device {ordinal}: ftrun's kernels need a few MiB, and {free >> 20} of {total >> 20} MiB are free "
                f"({error.strerror}); use a smaller model or batch, or run the script without protect()"
            ) from None
        if error.errno != errno.ENOEXEC:
            raise
        raise DeviceError(f"{error.strerror}; update the driver, or run the script without protect()") from None
