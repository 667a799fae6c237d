"""Transfers as a worker sees them: their terms from the board, their progress on it, and who takes part.

No decision here: what is moved and what an error means is the caller's business.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from ftrun import native
from ftrun.core import gate, moves
from ftrun.core.board import F
from ftrun.core.errors import WorkerError
from ftrun.core.limits import memory_left
from ftrun.core.moves import Move
from ftrun.native import transfer
from ftrun.native.transfer import CHECK_BACK, CHECK_READ, Extent, Facts, Moved, Terms
from ftrun.worker.context import Context, Interrupt
from ftrun.worker.segment import Segment, room_for

_PEER = 120.0  # seconds for a copy between two mapped segments
_EXCHANGE = 120.0  # seconds for everybody to get everything, and to come at all
_RING = "ring"  # name under which the keeper passes an exchange's memory on
_SPANS = 256  # pieces of a transfer's work whose times are kept
_STAGES = {transfer.LOAD: moves.H2D, transfer.BROADCAST: moves.BROADCAST_SRC, transfer.RELOAD: moves.BROADCAST_DST}
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
    """Copy between mapped segments, of a GPU if it is named, hashed on the way and read back. Errors: transfer.TransferError."""
    with progress(context, sum(size for _, size in source)) as moved:
        return transfer.copy(to, source, Terms(check=CHECK_BACK, timeout=_PEER, moved=moved), gpu)


def host_reload(context: Context, facts: Facts, share: list[Extent], to: list[Extent]) -> Moved:
    """Every rank of the world sends its share and gets the whole; all of them call this with facts of one world.

    `facts.chunk` is chosen here. Errors: transfer.TransferError, Interrupt when the world is stopped, DeviceError when there
    is no room for the buffers.
    """
    world = context.world
    assert world is not None
    watch = (context.board.gate_address, gate.GENERATION_SHIFT, world.generation)
    first = world.places[0].cell == context.cell.index
    with contextlib.ExitStack() as stack:
        if first:
            ring, facts = _make_ring(context, facts, stack)
        else:
            ring, facts = _find_ring(context, facts)
        stack.callback(ring.close)
        # in one go: page faults one by one would cost as much as the copies
        native.populate(ring.address, facts.ring_bytes, True)
        for address, size in to:
            native.populate(address, size, True)
        moved = stack.enter_context(progress(context, facts.total))
        terms = Terms(threads=1, check=CHECK_READ, timeout=_EXCHANGE, watch=watch, moved=moved, spans=_SPANS)
        me = next(i for i, p in enumerate(world.places) if p.cell == context.cell.index)
        done = facts.run(ring.address, me, share, to, terms)
    tell(context, [_move(span, me, world.places[span.source].rank) for span in done.spans])
    return done


def _move(span: transfer.Span, me: int, source: int) -> Move:
    own = span.stage == transfer.RELOAD and span.source == me
    return Move(moves.RELOAD if own else _STAGES[span.stage], source, span.begin, span.end)


def tell(context: Context, done: list[Move]) -> None:
    """Leave the times of a transfer for the launcher. They are for people: without room for them, there are none."""
    with contextlib.suppress(OSError):
        context.report(moves.file_name(context.cell.index, context.generation), {"moves": done})


def _make_ring(context: Context, facts: Facts, stack: contextlib.ExitStack) -> tuple[Segment, Facts]:
    count = facts.participants
    left = memory_left()
    facts = _with_chunk(facts, transfer.chunk_size(facts.total // count, 0 if left is None else left // (2 * count)))
    with room_for(facts.ring_bytes + count * facts.chunk, "the buffers of a reload from the host snapshot"):
        ring = Segment.create(f"ring-{facts.generation}", facts.ring_bytes)
        facts.prepare(ring.address)
    if not context.wait_until(lambda: _hand_on(context, ring), _EXCHANGE):
        raise WorkerError(f"there was no keeper for {_EXCHANGE:.0f} s to pass the buffers of a reload on")
    stack.callback(_forget_ring, context)
    context.board.ring_workers()
    return ring, facts


def _hand_on(context: Context, ring: Segment) -> bool:
    try:
        context.keeper.put(context.rank, _RING, context.cell.index, ring.fd)
    except OSError:
        return False  # it died: another one is being started
    return True


def _forget_ring(context: Context) -> None:
    with contextlib.suppress(OSError):  # a dead keeper holds nothing any more
        context.keeper.forget(context.rank, _RING)


def _find_ring(context: Context, facts: Facts) -> tuple[Segment, Facts]:
    """The ring that the world's first rank made for this generation."""
    world = context.world
    assert world is not None
    deadline = time.monotonic() + _EXCHANGE
    while True:
        seen = context.board.worker_bell()
        if context.stop_pending():
            raise Interrupt
        with contextlib.suppress(OSError):
            fd = context.keeper.get(world.places[0].rank, _RING)
            if fd is not None and os.readlink(f"/proc/self/fd/{fd}").startswith(
                f"/memfd:ftrun-ring-{facts.generation} "
            ):
                ring = Segment.attach(fd)
                buffers = (ring.length - facts.control_bytes) // (transfer.BUFFERS * facts.participants)
                return ring, _with_chunk(facts, buffers)
            if fd is not None:
                os.close(fd)  # an earlier generation's
        if time.monotonic() > deadline:
            raise WorkerError(f"no memory for the reload came from rank {world.places[0].rank} in {_EXCHANGE:.0f} s")
        context.board.wait_workers(seen, _LOOK)


def _with_chunk(facts: Facts, chunk: int) -> Facts:
    return Facts(facts.participants, chunk, facts.total, facts.source, facts.generation, facts.step, facts.layout)
