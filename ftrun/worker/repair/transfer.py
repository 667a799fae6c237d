"""Run a worker's transfers, with their terms from the board and their progress on it.

This file decides nothing: the caller chooses what to move, and judges errors.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ftrun import native
from ftrun.core.errors import WorkerError
from ftrun.core.shared import gate, notes
from ftrun.core.shared.board import F
from ftrun.core.shared.notes import Move, MovesNote
from ftrun.core.system.cgroup import memory_left
from ftrun.native import cuda, transfer
from ftrun.native.transfer import CHECK_BACK, CHECK_READ, Extent, Facts, Moved, OnGpu, Terms
from ftrun.worker.link.position import Interrupt
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.segment import Segment, room_for
from ftrun.worker.repair import gpu_staging

_PEER = 120.0  # seconds for a copy between two mapped segments
_EXCHANGE = 120.0  # seconds for every rank to come, and to get everything
_SPANS = 256  # pieces of a transfer's work whose times it keeps
_STAGES = {transfer.LOAD: notes.H2D, transfer.BROADCAST: notes.BROADCAST_SRC, transfer.RELOAD: notes.BROADCAST_DST}
_LOOK = 0.02  # seconds between two looks for the ring


@contextlib.contextmanager
def progress(context: Context, total: int) -> Iterator[int]:
    """Show a transfer of `total` bytes on the board while the body runs; give the address of its count."""
    cell = context.cell
    cell[F.MOVED] = 0
    cell[F.MOVE_SINCE] = time.monotonic_ns()
    cell[F.MOVE_TOTAL] = total
    try:
        yield cell.field_address(F.MOVED)
    finally:
        cell[F.MOVE_TOTAL] = 0


@contextlib.contextmanager
def counted(context: Context, total: int) -> Iterator[Callable[[int], None]]:
    """Show a transfer of `total` bytes that Python makes; the body tells of each piece by the function that it gets."""
    with progress(context, total):

        def moved(size: int) -> None:
            context.cell[F.MOVED] = context.cell[F.MOVED] + size

        yield moved


def peer_copy(context: Context, to: list[Extent], source: list[Extent], gpu: int | None = None) -> Moved:
    """Copy between mapped segments (of GPU `gpu`, if given); hash the bytes on the way and read them back.

    Raises:
        transfer.TransferError
    """
    with progress(context, sum(size for _, size in source)) as moved:
        return transfer.copy(to, source, Terms(check=CHECK_BACK, timeout=_PEER, moved=moved), gpu)


@dataclass(frozen=True)
class Part:
    """One exchange. `share`: this rank's share, in host memory; `to`: room for the whole, on `gpu` (None = the host).

    The rank that makes the ring chooses the chunk of `facts`.
    """

    facts: Facts
    share: Extent
    to: Extent
    gpu: int | None = None

    @property
    def name(self) -> str:
        """The name under which the fd store passes the ring on."""
        return "ring" if self.gpu is None else "gpu-ring"

    def shared_bytes(self, facts: Facts) -> int:
        """Return the bytes of the ring; it does not hold the buffers on a GPU."""
        return facts.ring_bytes if self.gpu is None else facts.control_bytes


def host_reload(context: Context, parts: list[Part]) -> int:
    """Send this rank's share and get the whole, part after part; every rank of the world calls this alike.

    Return the bytes written here.

    Raises:
        transfer.TransferError
        Interrupt: If the world is stopped.
        WorkerError: If a rank or the fd store does not come in time.
        DeviceError: If there is no room for the buffers or they cannot be mapped.
        CudaError
    """
    world = context.world
    assert world is not None
    me = next(i for i, p in enumerate(world.places) if p.cell == context.cell.index)
    done = [_exchange(context, part, me) for part in parts]
    tell(context, [_move(span, me, world.places[span.source].rank) for one in done for span in one.spans])
    return sum(one.copied for one in done)


def _exchange(context: Context, part: Part, me: int) -> Moved:
    watch = (context.board.gate_address, gate.GENERATION_SHIFT, part.facts.generation)
    with contextlib.ExitStack() as stack:
        ring, facts = _make_ring(context, part, stack) if me == 0 else _find_ring(context, part, stack)
        # fault all pages in at once: one by one they would cost as much as the copies
        native.populate(ring.address, ring.length, True)
        gpu = None
        if part.gpu is None:
            native.populate(*part.to, True)
        else:
            gpu = OnGpu(part.gpu, stack.enter_context(gpu_staging.mapped(context, facts, part.gpu, _EXCHANGE)))
        with progress(context, facts.total) as moved:
            terms = Terms(threads=1, check=CHECK_READ, timeout=_EXCHANGE, watch=watch, moved=moved, spans=_SPANS)
            done = facts.run(ring.address, me, [part.share], [part.to], terms, gpu)
        _await_all(context, ring, facts)
    return done


def _await_all(context: Context, ring: Segment, facts: Facts) -> None:
    """Wait until every rank has found the ring: where a small state gives some no share, others finish without them."""

    def came() -> bool:
        return all(transfer.look(ring.address, who).state for who in range(facts.participants))

    if not context.wait_until(came, _EXCHANGE):
        raise WorkerError(f"not every rank came to the reload in {_EXCHANGE:.0f} s")


def _move(span: transfer.Span, me: int, source: int) -> Move:
    own = span.stage == transfer.RELOAD and span.source == me
    return Move(notes.RELOAD if own else _STAGES[span.stage], source, span.begin, span.end)


def tell(context: Context, done: list[Move]) -> None:
    """Note the times of a transfer for the launcher."""
    context.note(MovesNote(context.cell.index, context.generation, tuple(done)))


def _make_ring(context: Context, part: Part, stack: contextlib.ExitStack) -> tuple[Segment, Facts]:
    count = part.facts.participants
    left = memory_left() if part.gpu is None else cuda.room(part.gpu)[0]
    chunk = transfer.chunk_size(part.facts.total // count, 0 if left is None else max(1, left // (2 * count)))
    facts = _with_chunk(part.facts, chunk)
    size = part.shared_bytes(facts)
    with room_for(size + count * facts.chunk, "the buffers of a reload from the host snapshot"):
        ring = Segment.create(f"{part.name}-{facts.generation}", size)
        stack.callback(ring.close)
        facts.prepare(ring.address)
    lent = context.rank, part.name
    stack.callback(context.lent.take_back, *lent)
    if not context.wait_until(lambda: context.lent.hand_on(*lent, context.cell.index, ring.fd), _EXCHANGE):
        raise WorkerError(f"there was no fd store for {_EXCHANGE:.0f} s to pass the buffers of a reload on")
    context.board.ring_workers()
    return ring, facts


def _find_ring(context: Context, part: Part, stack: contextlib.ExitStack) -> tuple[Segment, Facts]:
    """Wait for the ring that the world's first rank made for this generation."""
    world = context.world
    assert world is not None
    deadline = time.monotonic() + _EXCHANGE
    wanted = f"/memfd:ftrun-{part.name}-{part.facts.generation} "
    while True:
        seen = context.board.worker_bell.count()
        if context.stop_pending():
            raise Interrupt
        with contextlib.suppress(OSError):
            fd = context.fd_store.get(world.places[0].rank, part.name)
            if fd is not None and os.readlink(f"/proc/self/fd/{fd}").startswith(wanted):
                ring = Segment.attach(fd)
                stack.callback(ring.close)
                return ring, _with_chunk(part.facts, Facts.read(ring.address).chunk)
            if fd is not None:
                os.close(fd)  # an earlier generation's
        if time.monotonic() > deadline:
            raise WorkerError(f"no memory for the reload came from rank {world.places[0].rank} in {_EXCHANGE:.0f} s")
        context.board.worker_bell.wait(seen, _LOOK)


def _with_chunk(facts: Facts, chunk: int) -> Facts:
    return Facts(facts.participants, chunk, facts.total, facts.source, facts.generation, facts.step, facts.layout)
