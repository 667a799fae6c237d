"""Hand a rank's memory to the fd store, and fetch what a rank handed over.

An arena on a GPU has several allocations, each with its own descriptor, kept as "arena.0", "arena.1", ...
"""

from __future__ import annotations

import os
import sys

from ftrun.core.shared.board import F
from ftrun.core.shared.handle import Handle, Kind
from ftrun.native import cuda
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.arena import Arena
from ftrun.worker.memory.gpu_memory import Chunk, DeviceMemory, unsettled
from ftrun.worker.memory.segment import Segment
from ftrun.worker.repair.gpu_reader import GpuReader
from ftrun.worker.repair.ledger import Ledger
from ftrun.worker.state import rng
from ftrun.worker.state.protected_state import ProtectedState


class Kept:
    """This rank's memory at the fd store. Calls return False if there is no fd store now: call again when there is one."""

    def __init__(self, context: Context, state: ProtectedState, ledger: Ledger) -> None:
        self._context = context
        self._state = state
        self._ledger = ledger
        self._warned = False
        self._reads = GpuReader(context)

    def send(self) -> bool:
        """Hand over everything, the parts before the whole."""
        if not self._state.laid_out:
            return False
        self.follow()
        memory = self._state.arena.memory
        chunks = list(memory.chunks) if memory is not None else []
        for index, chunk in enumerate(chunks):
            if not self._send_chunk(index, chunk):
                return False
        arena, slots = self._state.arena.segment, self._ledger.slots.segment
        return self._put("arena", arena.fd, parts=len(chunks)) and self._put("slots", slots.fd)

    def follow(self) -> None:
        """Send each new allocation on a GPU to the fd store from now on, and read what it asks for."""
        memory = self._state.arena.memory
        if memory is not None:
            memory.on_chunk = self._grown
            self._reads.offer(memory)

    def _grown(self, index: int, chunk: Chunk) -> None:
        self._send_chunk(index, chunk)

    def _send_chunk(self, index: int, chunk: Chunk) -> bool:
        uuid = cuda.device(self._state.arena.gpu_part.ordinal).uuid
        return self._put(f"arena.{index}", chunk.fd, Handle(Kind.CUDA, chunk.size, uuid))

    def _put(self, name: str, fd: int, handle: Handle | None = None, parts: int = 0) -> bool:
        context = self._context
        try:
            why = context.fd_store.put(context.rank, name, context.cell.index, fd, handle, parts)
        except OSError:
            return False  # this rank cannot be adopted until the next fd store has it
        if why and not self._warned:
            self._warned = True
            print(
                f"ftrun: rank {context.rank}: the fd store holds device memory by its descriptor only ({why}); "
                "should the weights be lost when a worker dies, a replica's are taken",
                file=sys.stderr,
                flush=True,
            )
        return True


def use_gpu(context: Context, state: ProtectedState) -> int | None:
    """Return the GPU that the model is on (None = none). From now on the fence waits for this worker's end."""
    gpu = state.gpu
    if gpu is not None:
        context.cell[F.DEVICE] = gpu + 1
        rng.use_device(gpu)
        if context.rank == 0:
            _tell_unsettled(gpu)
    return gpu


def _tell_unsettled(gpu: int) -> None:
    missing = unsettled()
    if missing:
        print(
            f"ftrun: the model is on device {gpu}, whose results may differ from one process to the next, in a repaired run as in "
            f"two runs without a failure; for the same bits set {', '.join(missing)}",
            file=sys.stderr,
            flush=True,
        )


def fetch(context: Context, rank: int, name: str) -> Segment | None:
    """Map the kept host segment of a rank; return None if the fd store has none."""
    ready = context.mapped.pop((rank, name), None)
    if ready is not None and not (name == "arena" and DeviceMemory.used_by(ready)):
        return ready  # only an arena on a GPU may have been replaced since
    if ready is not None:
        ready.close()
    found = _get(context, rank, name)
    if found is None:
        return None
    fd, handle = found
    if handle.kind is not Kind.HOST:
        os.close(fd)
        return None
    return Segment.attach(fd)


def fetch_gpu(context: Context, rank: int, arena: Arena, gpu: int, write: bool) -> None:
    """Map an arena's part on a GPU, if it has one.

    Raises:
        DeviceError
    """

    def part(index: int) -> int | None:
        found = _get(context, rank, f"arena.{index}")
        if found is not None and found[1].kind is not Kind.CUDA:
            os.close(found[0])
            found = None
        return None if found is None else found[0]

    arena.attach_gpu(gpu, part, write)


def _get(context: Context, rank: int, name: str) -> tuple[int, Handle] | None:
    try:
        return context.fd_store.find(rank, name)
    except OSError:
        return None
