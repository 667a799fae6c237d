"""The host snapshot keeps what a rank needs to go back to an earlier step, in memory that the fd store holds.

Every rank keeps its 1/n share of the committed zone (replicas are equal, so the shares of all make the whole) and its own parts:
buffers, parameters that are not replicated, manifest, and END slot. Of a sharded model, all parts are a rank's own. n counts the ranks of
its node: each node can go back by itself, and only to which step is decided by all of them.
The segment has two halves; each is sealed with its step, which the board shows. A rank never overwrites the newest step that all ranks
have, so they always have one in common, even if a rank dies or runs out of room. Of other nodes' ranks that is known as of the last gate,
which is enough: whoever takes a snapshot has passed a gate at which everybody had taken the one before, or missed it. A replacement goes
on in its predecessor's segment.

Where spare nodes wait, each node copies the snapshots of the node before it (ftrun/helpers/snapshot_copies.py), and a rank takes no
other one before the copies of the last one are made. A rank whose node was lost brings its own from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys

from ftrun.core.errors import DeviceError, PlatformError
from ftrun.core.shared.board import F, Head, snapshots_of
from ftrun.core.shared.snapshot_layout import HALVES, NAME
from ftrun.native.cuda import CudaError
from ftrun.native.transfer import Facts
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory import serialization
from ftrun.worker.memory.arena import Manifest
from ftrun.worker.memory.segment import Segment, room_for
from ftrun.worker.repair import far_snapshot
from ftrun.worker.repair.ledger import Ledger
from ftrun.worker.repair.rank_state import fields_of
from ftrun.worker.repair.recovery_points import END
from ftrun.worker.repair.snapshot_store import BadSnapshot, Places, Store
from ftrun.worker.state.protected_state import ProtectedState

_NO_STEP = -1


class Snapshots:
    """Takes a snapshot of this rank every `every` steps; 0 = never."""

    def __init__(self, context: Context, state: ProtectedState, ledger: Ledger) -> None:
        self._context = context
        self._state = state
        self._ledger = ledger
        self.every = context.snapshot_every
        self._store: Store | None = None
        self._room = 0  # bytes that each half has had room for

    @property
    def store(self) -> Store | None:
        return self._store

    def take_if_due(self, step: int) -> None:
        """Every `every` steps, keep the state as of the start of gate step `step`, whose END slot is sealed.

        If a snapshot fails, for lack of room say, this prints why and takes no more.
        """
        if self.every <= 0 or (step - self._context.position.base) % self.every or self._being_copied():
            return
        try:
            self._take(step)
        except (DeviceError, PlatformError, CudaError) as error:
            self.every = 0
            why = error.strerror if isinstance(error, CudaError) else error
            print(f"ftrun: rank {self._context.rank}: no more host snapshots: {why}", file=sys.stderr)

    def _take(self, step: int) -> None:
        context, state = self._context, self._state
        arena, world = state.arena, context.world
        assert world is not None
        manifest, shared = state.manifest, _is_shared(state, world.size)
        begin, size = arena.committed
        facts = {"world_size": world.size, "zone": size, "zone_gpu": 0}
        facts |= {"committed": size, "layout": layout_of(manifest)} if shared else {"committed": 0, "layout": 0}
        pieces: dict[str, Places | bytes] = {
            "share": Places(arena, [_share(context, begin, size)] if shared else []),
            "buffers": Places(arena, [state.live_buffers()]),
            "private": Places(arena, own_places(state, manifest, world.size, False)),
        }
        if arena.memory is not None:
            # the copies wait for an update that the device may still be in
            begin, facts["zone_gpu"] = arena.memory.extent("committed")
            pieces["share_gpu"] = Places(arena, [_share(context, begin, facts["zone_gpu"])] if shared else [], True)
            pieces["buffers_gpu"] = Places(arena, [state.live_buffers_on_gpu()], True)
            pieces["private_gpu"] = Places(arena, own_places(state, manifest, world.size, True), True)
        pieces["manifest"] = manifest.to_bytes()
        pieces["slot"] = serialization.plain(fields_of(self._ledger.read(END)))  # it outlives the histories' logs
        needed = sum(len(p) if isinstance(p, bytes) else p.size for p in pieces.values())
        more = max(0, needed - self._room)
        with room_for(2 * more, "a host snapshot"):
            fresh = self._store is None
            if self._store is None:
                self._store = Store.create(context.rank, arena)
            facts["committed_gpu"] = facts["zone_gpu"] if shared else 0
            half = self._store.half_for(self._common())
            context.cell[F.FIRST_HALF + half] = 0
            self._store.write(half, step, facts, pieces)
            context.cell[F.FIRST_HALF + half] = step + 1
            self._room = max(self._room, needed)
        if fresh:
            with contextlib.suppress(OSError):  # the next fd store gets it with the other segments
                self.send()

    def _being_copied(self) -> bool:
        """Are copies of the newest snapshot of all ranks still being made? It must stay until they are, and the one before as long."""
        world, board = self._context.world, self._context.board
        return world is not None and world.span is not None and world.span.mirrored and board[Head.COPIED] < board[Head.SNAPSHOT]

    def _common(self) -> int:
        """Return the newest step of which every rank shows a snapshot; -1 = none."""
        context = self._context
        if context.world is not None and context.world.span is not None:
            return context.board[Head.SNAPSHOT] - 1
        return max(snapshots_of(context.cells()), default=_NO_STEP)

    def adopt(self) -> None:
        """Go on in the predecessor's segment, if the run takes snapshots and there is one."""
        store = attach(self._context, self._context.rank) if self.every > 0 and self._store is None else None
        if store is not None:
            self._store, self._room = store, store.used()
            self._show()

    def of_step(self, step: int) -> Store:
        """Return the segment with the snapshot of that step; if this node has none, brought from the one that copies it.

        Raises:
            BadSnapshot: There is none.
            DeviceError: There is no room for it.
        """
        if self._store is None or step not in self._store.steps():
            try:
                store = far_snapshot.bring(self._context, step)
            except (OSError, PlatformError) as error:
                raise BadSnapshot(f"there is no host snapshot of step {step} of this rank on its node, nor on another: {error}") from error
            if self._store is not None:
                self._store.segment.close()
            self._store, self._room = store, store.used()
            self._show()
            with contextlib.suppress(OSError):  # the next fd store gets it with the other segments
                self.send()
        return self._store

    def went_back(self, step: int) -> None:
        """Discard the snapshots of steps after `step`, to which all ranks went back."""
        if self._store is not None:
            for kept, half in self._store.steps().items():
                if kept > step:
                    self._store.discard(half)
            self._show()

    def _show(self) -> None:
        assert self._store is not None
        sealed = {half: step for step, half in self._store.steps().items()}
        for half in HALVES:
            self._context.cell[F.FIRST_HALF + half] = sealed.get(half, _NO_STEP) + 1

    def handed_over(self) -> bool:
        """Send the segment as `send` does; return False if there is no fd store now."""
        try:
            self.send()
        except OSError:
            return False
        return True

    def send(self) -> None:
        """Hand the segment to the fd store.

        Raises:
            OSError: If there is none.
        """
        if self._store is not None:
            context = self._context
            context.fd_store.put(context.rank, NAME, context.cell.index, self._store.segment.fd)


def layout_of(manifest: Manifest) -> int:
    """Hash names, types, shapes and places in the committed zone: equal if one copy fits the other."""
    rows = [(e.name, e.dtype, e.shape, e.offset, e.block, e.on_gpu) for e in manifest.entries if e.zone == "committed"]
    return int.from_bytes(hashlib.sha256(repr(rows).encode()).digest()[:8], "little")


def own_places(state: ProtectedState, manifest: Manifest, world_size: int, on_gpu: bool) -> list[tuple[int, int]]:
    """Return (offset, size) of the blocks that not all ranks are proved to share, in the arena's host or GPU part.

    These are private parameters, and all parameters of a model that is sharded or without DDP.
    """
    everyone = frozenset(range(world_size)) if not state.is_sharded else None
    # an empty block lies where the next one does
    equal = state.holders.entries(manifest, everyone, proved=True) if everyone is not None else iter(())
    replicated = {e.offset for e in equal if e.on_gpu == on_gpu and e.block}
    committed = [e for e in manifest.entries if e.zone == "committed" and e.on_gpu == on_gpu and e.block]
    return sorted({e.offset: e.block for e in committed if e.offset not in replicated}.items())


def _is_shared(state: ProtectedState, world_size: int) -> bool:
    """Do all ranks hold some entries alike, so that each keeps a share of the zone?"""
    return not state.is_sharded and any(
        state.holders.entries(state.manifest, frozenset(range(world_size)), proved=True)
    )


def newest_common(context: Context) -> tuple[int, str]:
    """Return the newest step of which all ranks of this node have snapshots that fit each other, or -1 and why; does not check contents."""
    world = context.world
    assert world is not None
    stores = {place.rank: attach(context, place.rank) for place in world.places}
    found = {rank: store for rank, store in stores.items() if store is not None}
    try:
        if len(found) < len(stores):
            return _NO_STEP, f"there is no host snapshot of rank {min(stores.keys() - found)}"
        steps = {rank: store.steps() for rank, store in found.items()}
        for step in sorted(set.intersection(*map(set, steps.values())), reverse=True):
            records = [store.record(step) for store in found.values()]
            if len({r.agrees for r in records}) == 1 and records[0].world_size == world.size:
                return step, ""
        kept = (f"{' and '.join(map(str, sorted(own))) or 'none'} on rank {rank}" for rank, own in steps.items())
        return _NO_STEP, f"the ranks' host snapshots are of no step in common ({', '.join(kept)})"
    except (BadSnapshot, ValueError, KeyError) as error:
        return _NO_STEP, f"a host snapshot is damaged ({error})"
    finally:
        for store in found.values():
            store.segment.close()


def attach(context: Context, rank: int) -> Store | None:
    """Map the kept snapshot of a rank; return None if there is none, or no fd store."""
    try:
        fd = context.fd_store.get(rank, NAME)
    except OSError:
        return None
    return Store(Segment.attach(fd)) if fd is not None else None


def _share(context: Context, begin: int, size: int) -> tuple[int, int]:
    """Return (offset, size) of this rank's share of [begin, begin + size), among the ranks of its node."""
    world = context.world
    assert world is not None
    me = next(i for i, p in enumerate(world.places) if p.cell == context.cell.index)
    offset, share = Facts(len(world.places), 1, size).share(me)
    return begin + offset, share
