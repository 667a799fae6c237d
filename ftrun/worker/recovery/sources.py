"""Where a rank's state may still be: its own kept memory and that of its replicas, and the words for finding none."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ftrun.core.errors import WorkerError
from ftrun.core.shared import gate
from ftrun.core.shared.board import Board, F
from ftrun.core.shared.world import World
from ftrun.worker.kept.handover import fetch
from ftrun.worker.kept.recovery_points import Slots
from ftrun.worker.memory.arena import Arena
from ftrun.worker.runtime.run_link import Context

KEPT = 5.0  # seconds that a new fd store gets to be handed the survivors' memory


class NoSource(WorkerError):
    """No rung of the ladder holds for this rank."""


class Superseded(Exception):
    """Meanwhile every rank is to go back to the host snapshot: start the restore again, in that world."""


@dataclass(frozen=True)
class Replica:
    """Another rank's kept memory."""

    rank: int
    slots: Slots
    arena: Arena


def resume_of(context: Context) -> int:
    """Gate number at which this replacement goes on."""
    world = context.world
    if world is None:
        raise WorkerError("a replacement without a world")
    return gate.unpack(context.board.gate()).last + 1 if world.tail else world.resume


def read_log(context: Context) -> list[dict[str, Any]]:
    """What the replaced rank's collectives gave before its first step and between its loops. Errors: NoSource, DamagedSlot."""
    segment = fetch(context, context.rank, "slots")
    if segment is not None:
        context.mapped[(context.rank, "slots")] = segment
        slots: Slots | None = Slots(segment)
    else:
        slots = _slots_of_another(context)  # the fd store that had this rank's died with it
    if slots is None:
        raise NoSource("the fd store has no slots of this rank (its fd store died, or the rank died before protect)")
    return list(slots.log())


def _slots_of_another(context: Context) -> Slots | None:
    """The slots of the first rank that the new fd store has them of, which gets them from the survivors."""
    world, deadline = context.world, time.monotonic() + KEPT
    while world is not None and time.monotonic() < deadline:
        seen = context.board.worker_bell()
        for rank in donors(context.board, world, context.rank):
            segment = fetch(context, rank, "slots")
            if segment is not None:
                return Slots(segment)
        context.board.wait_workers(seen, 0.05)
    return None


def donors(board: Board, world: World, rank: int) -> list[int]:
    """The other ranks, the next one first, without those whose memory is known to be corrupt."""
    corrupt = {int(r) for r, cell in (world.lost or {}).items() if board.cell(cell)[F.CORRUPT]}
    return [r for k in range(1, world.size) if (r := (rank + k) % world.size) not in corrupt]
