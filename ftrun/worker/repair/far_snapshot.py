"""This rank's host snapshot on the node that copies those of this rank's node: where that was lost, a replacement goes back to the copy."""

from __future__ import annotations

import contextlib

from ftrun.core.shared import far
from ftrun.core.shared import snapshot_layout as layout
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.segment import Segment, room_for
from ftrun.worker.repair import transfer
from ftrun.worker.repair.snapshot_store import BadSnapshot, Store


def newest(context: Context) -> int:
    """Return the newest step of which that node has a copy.

    Raises:
        OSError: It has none, or cannot be reached.
    """
    with contextlib.closing(_line(context)) as line:
        store = _opened(context, line)
        steps = store.steps()
        store.segment.close()
    if not steps:
        raise OSError("its copies are not whole")
    return max(steps)


def bring(context: Context, step: int) -> Store:
    """Copy the snapshot of `step` from that node into new memory.

    Raises:
        OSError: It has none, or cannot be reached.
        PlatformError
        DeviceError: There is no room for it.
    """
    with contextlib.closing(_line(context)) as line:
        store = _opened(context, line)
        segment = store.segment
        try:
            for other, half in store.steps().items():
                if other != step:
                    store.discard(half)
            line.read(context.rank, layout.NAME, store.facts(step), segment.view)
            pieces = [(piece.offset, piece.size) for piece in store.record(step).pieces.values()]
            needed = sum(size for _, size in pieces)
            with room_for(needed, "a host snapshot from another node"), transfer.counted(context, needed) as moved:
                line.read(context.rank, layout.NAME, pieces, segment.view, lambda _, part: moved(len(part)))
        except BadSnapshot as error:
            segment.close()
            raise OSError(str(error)) from error
        except BaseException:
            segment.close()
            raise
    return store


def _line(context: Context) -> far.FarLine:
    assert context.world is not None
    span = context.world.span
    where = span.mirror_of(context.rank) if span is not None else None
    if span is None or where is None:
        raise OSError("no other node copies it")
    return far.FarLine(where, span.secret, far.PATIENCE)


def _opened(context: Context, line: far.FarLine) -> Store:
    """Return memory with the heads of the copy's halves, and nothing else yet."""
    rank = context.rank
    length = line.size(rank, layout.NAME)
    if length is None:
        raise OSError("the node that copies it has no copy")
    segment = Segment.create(f"snapshot-{rank}", length)
    try:
        places = [(half * (length // 2), layout.HEAD_BYTES) for half in layout.HALVES]
        line.read(rank, layout.NAME, places, segment.view)
    except OSError:
        segment.close()
        raise
    return Store(segment)
