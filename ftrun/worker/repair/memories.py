"""Fetch other ranks' memory from the fd store, once each, and look at it until a decision is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TypeVar

from ftrun.core.shared.board import Board, F, Head
from ftrun.core.shared.world import World, newest_world
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.arena import Arena
from ftrun.worker.repair.handover import fetch
from ftrun.worker.repair.plan import NONE, Peer, Tags
from ftrun.worker.repair.recovery_points import END, GATE, START, Slots

_T = TypeVar("_T")


class Superseded(Exception):
    """A newer world sends every rank back to the host snapshot: start the restore again, in that world."""


@dataclass(frozen=True)
class Memory:
    """The memory of another rank."""

    rank: int
    slots: Slots
    arena: Arena

    @property
    def tags(self) -> Tags:
        return tags_of(self.slots, self.arena)


class Memories:
    """The memory of all other ranks."""

    def __init__(self, context: Context) -> None:
        assert context.world is not None
        self._context = context
        self._world = context.world
        self._found: dict[int, Memory] = {}
        self._refused: dict[int, str] = {}

    def of(self, rank: int) -> Memory:
        """Return the memory of a rank that was reported as kept."""
        return self._found[rank]

    def refuse(self, rank: int, why: object) -> None:
        """Note why that rank's memory was of no use."""
        self._refused[rank] = f"rank {rank}: {why}"

    def until(self, ranks: Set[int], decide: Callable[[tuple[Peer, ...], float], _T]) -> _T:
        """Call `decide` with those of `ranks` not known to be corrupt, the next one first, and the seconds so far, until it decides.

        Raises:
            Superseded
        """
        board, begin = self._context.board, time.monotonic()
        while True:
            seen = board.worker_bell()
            self._world = newest(self._context, self._world)  # in it, more ranks may be dead
            peers = tuple(map(self._peer, (rank for rank in donors(board, self._world, self._context.rank) if rank in ranks)))
            decision = decide(peers, time.monotonic() - begin)
            if decision is not None:
                return decision
            board.wait_workers(seen, 0.002)

    def _peer(self, rank: int) -> Peer:
        if rank not in self._found:
            arena, slots = (fetch(self._context, rank, name) for name in ("arena", "slots"))
            if arena is not None and slots is not None:
                self._found[rank] = Memory(rank, Slots(slots), Arena(arena))
        memory = self._found.get(rank)
        living = rank not in self._world.replaced  # read before its memory, so that its last writes are seen
        return Peer(rank, memory.tags if memory else Tags(), living, memory is not None, self._refused.get(rank, ""))


def tags_of(slots: Slots, arena: Arena | None) -> Tags:
    """Return the tags of slots and arena; without an arena there are no weights."""
    return Tags(NONE if arena is None else arena.seal, slots.tag(START), slots.tag(GATE), slots.tag(END))


def newest(context: Context, world: World) -> World:
    """Return `world`, or the one that took its place.

    Raises:
        Superseded
    """
    if context.board[Head.PUBLISHED] <= world.generation:
        return world
    found = newest_world(context.run_dir, context.board)
    if found.rollback:
        raise Superseded
    return found


def donors(board: Board, world: World, rank: int) -> list[int]:
    """Return the other ranks of this node, the next one first, without those whose memory is known to be corrupt."""
    corrupt = {r for r, cell in (world.lost or {}).items() if board.cell(cell)[F.CORRUPT]}
    return sorted(world.here - corrupt - {rank}, key=lambda other: (other < rank, other))
