"""Which ranks completed an update that another one died in: their END slots say what it did, and are compared with each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Set

from ftrun.core.shared.world import World
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.arena import Arena
from ftrun.worker.repair.handover import fetch
from ftrun.worker.repair.recovery_points import END, Slots
from ftrun.worker.repair.sources import PEER, donors

Newest = Callable[[World], World]  # the world that took one's place, if one did


def ends_of(context: Context, ranks: Set[int], resume: int, newest: Newest) -> tuple[list[Slots], bool]:
    """The slots of those of `ranks` that completed the update before the resume step. Waits for those that are in it.

    Returns:
        The slots, the next rank's first, and False where a living rank did not complete it within PEER seconds.

    Raises:
        Superseded: `newest` says so.
    """
    found, deadline = dict[int, Slots](), time.monotonic() + PEER
    world = context.world
    assert world is not None
    while True:
        seen = context.board.worker_bell()
        world = newest(world)
        others = [rank for rank in donors(context.board, world, context.rank) if rank in ranks]
        for rank in others:
            segment = fetch(context, rank, "slots") if rank not in found else None
            if segment is not None:
                found[rank] = Slots(segment)
        done = [rank for rank in others if rank in found and found[rank].tag(END) == resume]
        made = [rank for rank in others if rank in found and rank not in done and _was_taken_over(context, rank, resume)]
        # only a living rank completes anything; what the dead ones left is as it is
        in_time = all(rank in done or rank in made or rank in world.replaced for rank in others)
        if in_time or time.monotonic() > deadline:
            return [found[rank] for rank in done], in_time
        context.board.wait_workers(seen, 0.002)


def _was_taken_over(context: Context, rank: int, resume: int) -> bool:
    """Did another replacement copy or make that rank's update? Then it has no END slot of its own."""
    segment = fetch(context, rank, "arena")
    return segment is not None and Arena(segment).seal == resume
