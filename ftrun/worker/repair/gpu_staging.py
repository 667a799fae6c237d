"""The shared buffers of a reload between GPUs: every rank makes its own on its device and maps those of all others.

Their descriptors travel through the fd store, as those of arenas do. The end of the reload frees them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from ftrun.core.errors import DeviceError, WorkerError
from ftrun.core.shared.handle import Handle, Kind
from ftrun.native import cuda
from ftrun.native.transfer import BUFFERS, Facts
from ftrun.worker.link.position import Interrupt
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.gpu_memory import allocate, ordinal_of

_NAME = "buffers"  # of a rank's buffers at the fd store
_LOOK = 0.02  # seconds between two looks for another rank's buffers
_WHAT = "the reload from the host snapshot"


@contextlib.contextmanager
def mapped(context: Context, facts: Facts, gpu: int, timeout: float) -> Iterator[list[int]]:
    """Give the addresses of every participant's BUFFERS buffers of `facts.chunk` bytes, mapped for `gpu` while the body runs.

    The body must not end before every rank has come: until then ranks look for each other's buffers.

    Raises:
        DeviceError: If memory cannot be allocated or mapped.
        WorkerError: If a rank's buffers do not come in `timeout` seconds.
        Interrupt: If the world is stopped.
        CudaError
    """
    world = context.world
    assert world is not None
    unit = cuda.device(gpu).granularity
    stride = -(-facts.chunk // unit) * unit
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        own, fd, handle = _make(facts, gpu, BUFFERS * stride, stack)
        lent = context.rank, _NAME
        stack.callback(context.lent.take_back, *lent)
        if not context.wait_until(lambda: context.lent.hand_on(*lent, context.cell.index, fd, handle), timeout):
            raise WorkerError(f"there was no fd store for {timeout:.0f} s to pass the buffers of a reload on")
        context.board.ring_workers()
        addresses = []
        for place in world.places:
            at = own
            if place.cell != context.cell.index:
                theirs = _find(context, place.rank, facts.generation, deadline)
                at = _map(place.rank, gpu, *theirs, BUFFERS * stride, stack)
            addresses += [at + k * stride for k in range(BUFFERS)]
        yield addresses


def _make(facts: Facts, gpu: int, size: int, stack: contextlib.ExitStack) -> tuple[int, int, Handle]:
    """Allocate this rank's buffers; return (address, descriptor, handle)."""
    address = cuda.reserve(gpu, size)
    stack.callback(_undo, cuda.free_range, address, size)
    fd = allocate(gpu, address, size, _WHAT, "leave that much free on each device")
    stack.callback(os.close, fd)
    stack.callback(_undo, cuda.unmap, address, size)
    return address, fd, Handle(Kind.CUDA, size, cuda.device(gpu).uuid, facts.generation)


def _find(context: Context, rank: int, generation: int, deadline: float) -> tuple[int, Handle]:
    """Wait for another rank's descriptor and handle of this generation."""
    while True:
        seen = context.board.worker_bell.count()
        if context.stop_pending():
            raise Interrupt
        with contextlib.suppress(OSError):
            found = context.fd_store.find(rank, _NAME)
            if found is not None and found[1].generation == generation:
                return found
            if found is not None:
                os.close(found[0])  # an earlier generation's
        if time.monotonic() > deadline:
            raise WorkerError(f"{_WHAT}: the buffers of rank {rank} did not come in time")
        context.board.worker_bell.wait(seen, _LOOK)


def _map(rank: int, gpu: int, fd: int, handle: Handle, size: int, stack: contextlib.ExitStack) -> int:
    """Map another rank's buffers and return their address; `stack` closes `fd`."""
    stack.callback(os.close, fd)
    home = ordinal_of(handle.device)
    if home is None or handle.kind is not Kind.CUDA or handle.size != size:
        raise DeviceError(f"{_WHAT}: the buffers of rank {rank} are not on a GPU that this worker sees")
    address = cuda.reserve(gpu, size)
    stack.callback(_undo, cuda.free_range, address, size)
    try:
        cuda.attach(home, gpu, fd, address, size)
    except cuda.CudaError as error:
        raise DeviceError(f"{_WHAT}: the buffers of rank {rank} cannot be mapped: {error.strerror}") from error
    stack.callback(_undo, cuda.unmap, address, size)
    return address


def _undo(call: Callable[[int, int], None], address: int, size: int) -> None:
    with contextlib.suppress(cuda.CudaError):  # a lost device; the body's error is reported
        call(address, size)
