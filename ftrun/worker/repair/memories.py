"""Fetch other ranks' memory, once each, and look at it until a decision is made: on this node from the fd store, else over the network.

Ranks of other nodes are asked only where no rank of this node that holds the same lives, and a few of them: each look is a round trip.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TypeVar

from ftrun.core.errors import DeviceError
from ftrun.core.shared.board import Board, F, Head
from ftrun.core.shared.far import PATIENCE
from ftrun.core.shared.world import World, newest_world
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.arena import Arena
from ftrun.worker.memory.segment import Segment, room_for
from ftrun.worker.repair import transfer
from ftrun.worker.repair.far_memory import FarMemory, Unreached, mirrored_slots
from ftrun.worker.repair.handover import fetch
from ftrun.worker.repair.plan import NONE, Peer, Tags
from ftrun.worker.repair.recovery_points import END, GATE, START, Slots

_FAR = 3  # ranks of other nodes that are asked at once
_TRIES = 3  # how often this rank's own slots are asked for at least
_LOOK, _FAR_LOOK = 0.002, 0.01  # seconds between two looks on this node, and at others
_FAR_AGAIN = 0.1  # seconds between two questions for this rank's own slots
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
        self._far: dict[int, FarMemory] = {}
        self._refused: dict[int, str] = {}
        self._failed: dict[int, float] = {}  # since when another node's rank was of no use: it is asked again after all others

    def of(self, rank: int) -> Memory:
        """Return the memory of a rank that was reported as kept: the slots, and the arena as far as `with_weights` has brought it.

        Raises:
            Unreached
        """
        if rank in self._far:
            try:
                self._far[rank].read_slots()
            except OSError as error:
                raise Unreached(f"rank {rank}: {error}") from error
        return self._found[rank]

    def is_far(self, rank: int) -> bool:
        """Is it a rank of another node?"""
        return rank in self._far

    def with_weights(self, rank: int, buffers_only: bool = False) -> Memory:
        """Return the memory of a rank that was reported as kept, with what its arena holds in host memory.

        Raises:
            Unreached
        """
        far = self._far.get(rank)
        if far is None:
            return self._found[rank]
        try:
            with room_for(sum(size for _, size in far.arena.in_use(buffers_only)), "a copy from another node"):
                far.read_weights(buffers_only)
        except (OSError, DeviceError) as error:
            raise Unreached(f"rank {rank}: {error}") from error
        return self._found[rank]

    def close(self) -> None:
        """Hang up on other nodes, and give what was read of their arenas back. Slots stay: values that were decoded may lie in them."""
        for far in self._far.values():
            far.close()

    def refuse(self, rank: int, why: object) -> None:
        """Note why that rank's memory was of no use.

        One of another node is asked once more: a worker may have died that read its GPU.
        """
        far = self._far.pop(rank, None)
        if far is not None:
            far.close()
            del self._found[rank]
            if rank not in self._failed:
                self._failed[rank] = time.monotonic()
                return
        self._refused[rank] = f"rank {rank}: {why}"

    def until(self, ranks: Set[int], decide: Callable[[tuple[Peer, ...], float], _T]) -> _T:
        """Call `decide` with those of `ranks` not known to be corrupt, the next one first, and the seconds so far, until it decides.

        Raises:
            Superseded
        """
        board, begin = self._context.board, time.monotonic()
        while True:
            seen = board.worker_bell.count()
            self._world = newest(self._context, self._world)  # in it, more ranks may be dead
            peers = tuple(map(self._peer, (rank for rank in donors(board, self._world, self._context.rank) if rank in ranks)))
            if not any(peer.living and not peer.refused for peer in peers):
                asked = self._others(ranks)
                peers += tuple(map(self._far_peer, asked))
                if asked and self._refused.keys() >= {*asked} and not {*self._others(ranks)} <= {*asked}:
                    continue  # the next ones may be of use
            decision = decide(peers, time.monotonic() - begin)
            if decision is not None:
                return decision
            board.worker_bell.wait(seen, _FAR_LOOK if self._far or self._failed else _LOOK)

    def _peer(self, rank: int) -> Peer:
        if rank not in self._found:
            arena, slots = (fetch(self._context, rank, name) for name in ("arena", "slots"))
            if arena is not None and slots is not None:
                self._found[rank] = Memory(rank, Slots(slots), Arena(arena))
        memory = self._found.get(rank)
        living = rank not in self._world.replaced  # read before its memory, so that its last writes are seen
        return Peer(rank, memory.tags if memory else Tags(), living, memory is not None, self._refused.get(rank, ""))

    def _others(self, ranks: Set[int]) -> list[int]:
        """Return those of `ranks` on other nodes that are asked: living ones, without those whose memory was of no use.

        The ranks of a lost node ask different ones, as far as there are some.
        """
        here, mine, span = self._world.here, self._context.rank, self._world.span
        dead = frozenset(span.replaced) if span is not None else frozenset()
        order = sorted(ranks - here, key=lambda rank: (rank in dead, rank < mine, rank))
        some = [rank for rank in order if rank not in self._refused]
        some = [rank for rank in some if rank not in dead] or some
        some = [rank for rank in some if rank not in self._failed] or some
        turn = sorted(here).index(mine) % max(1, len(some))
        return (some[turn:] + some[:turn])[:_FAR] or order[:1]

    def _far_peer(self, rank: int) -> Peer:
        span, tags, kept, begin = self._world.span, Tags(), False, time.monotonic()
        address = span.memory_of(rank) if span is not None else None
        try:
            if span is None or address is None:
                self.refuse(rank, "its node does not serve its memory")
            elif rank not in self._far and rank not in self._refused:
                far = self._far[rank] = FarMemory(address, span.secret, rank, functools.partial(transfer.counted, self._context))
                self._found[rank] = Memory(rank, far.slots, far.arena)
            if rank in self._far:
                self._far[rank].look()
                kept, tags = self._far[rank].has_weights(), self._found[rank].tags
        except OSError as error:
            if rank in self._far or begin - self._failed.setdefault(rank, begin) > PATIENCE:
                self.refuse(rank, error)
        pending = rank in self._failed and rank not in self._far
        living = span is None or rank not in span.replaced
        return Peer(rank, tags, living, kept, self._refused.get(rank, ""), pending)


def own_slots(context: Context) -> Segment | None:
    """Map this rank's slots; None: nobody has them. Those of a rank whose node was lost come from the node that mirrors them."""
    segment, span = fetch(context, context.rank, "slots"), context.world.span if context.world is not None else None
    where = span.mirror_of(context.rank) if span is not None else None
    if segment is not None or span is None or where is None:
        return segment
    deadline, tries = time.monotonic() + PATIENCE, 0
    while segment is None:
        seen = context.board.worker_bell.count()
        try:
            segment = mirrored_slots(where, span.secret, context.rank)
        except OSError:
            tries += 1
            if tries >= _TRIES and time.monotonic() > deadline:
                return None
            context.board.worker_bell.wait(seen, _FAR_AGAIN)
    with contextlib.suppress(OSError):  # without an fd store, a replacement of this worker asks the other node again
        context.fd_store.put(context.rank, "slots", context.cell.index, segment.fd)
    return segment


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
    cells = {**{place.rank: place.cell for place in world.places}, **(world.lost or {})}
    corrupt = {r for r, cell in cells.items() if board.cell(cell)[F.CORRUPT]}
    return sorted(world.here - corrupt - {rank}, key=lambda other: (other < rank, other))
