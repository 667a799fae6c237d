"""Transfers as a worker sees them: their terms from the board, their progress on it, and who takes part.

No decision here: what is moved and what an error means is the caller's business.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
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
_EXCHANGE = 120.0  # seconds for everybody to get everything, and to come at all
_SPANS = 256  # pieces of a transfer's work whose times are kept
_STAGES = {transfer.LOAD: notes.H2D, transfer.BROADCAST: notes.BROADCAST_SRC, transfer.RELOAD: notes.BROADCAST_DST}
_LOOK = 0.02  # seconds between two looks for it


@contextlib.contextmanager
def progress(context: Context, total: int) -> Iterator[int]:
    """Show a transfer of `total` bytes on the board while the body runs; gives the address of the count."""
    cell = context.cell
    cell[F.MOVED] = 0
    cell[F.MOVE_SINCE] = time.monotonic_ns()
    cell[F.MOVE_TOTAL] = total
    try:
        yield cell.field_address(F.MOVED)
    finally:
        cell[F.MOVE_TOTAL] = 0


def peer_copy(context: Context, to: list[Extent], source: list[Extent], gpu: int | None = None) -> Moved:
    """Copy between mapped segments, of a GPU if it is named, hashed on the way and read back.

    Raises:
        transfer.TransferError
    """
    with progress(context, sum(size for _, size in source)) as moved:
        return transfer.copy(to, source, Terms(check=CHECK_BACK, timeout=_PEER, moved=moved), gpu)


@dataclass(frozen=True)
class Part:
    """What is moved by one exchange. `share`: this rank's, in host memory; `to`: room for the whole, on `gpu` (None = the host).

    The chunk of `facts` is chosen later.
    """

    facts: Facts
    share: Extent
    to: Extent
    gpu: int | None = None

    @property
    def name(self) -> str:
        """Under which the fd store passes the exchange's memory on."""
        return "ring" if self.gpu is None else "gpu-ring"

    def shared_bytes(self, facts: Facts) -> int:
        """Bytes of that memory: buffers on a GPU are not in it."""
        return facts.ring_bytes if self.gpu is None else facts.control_bytes


def host_reload(context: Context, parts: list[Part]) -> int:
    """Every rank of the world sends its share and gets the whole, part after part; all of them call this alike.

    Gives the bytes written here.

    Raises:
        transfer.TransferError
        Interrupt: When the world is stopped, WorkerError.
        DeviceError: When there is no room for the buffers or they cannot be mapped.
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
        # in one go: page faults one by one would cost as much as the copies
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
    """Whoever has all may be ahead of ranks that did not find the shared memory yet: of a small state not all have a share."""

    def came() -> bool:
        return all(transfer.look(ring.address, who).state for who in range(facts.participants))

    if not context.wait_until(came, _EXCHANGE):
        raise WorkerError(f"not every rank came to the reload in {_EXCHANGE:.0f} s")


def _move(span: transfer.Span, me: int, source: int) -> Move:
    own = span.stage == transfer.RELOAD and span.source == me
    return Move(notes.RELOAD if own else _STAGES[span.stage], source, span.begin, span.end)


def tell(context: Context, done: list[Move]) -> None:
    """Leave the times of a transfer for the launcher."""
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
    """The ring that the world's first rank made for this generation."""
    world = context.world
    assert world is not None
    deadline = time.monotonic() + _EXCHANGE
    wanted = f"/memfd:ftrun-{part.name}-{part.facts.generation} "
    while True:
        seen = context.board.worker_bell()
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
        context.board.wait_workers(seen, _LOOK)


def _with_chunk(facts: Facts, chunk: int) -> Facts:
    return Facts(facts.participants, chunk, facts.total, facts.source, facts.generation, facts.step, facts.layout)
