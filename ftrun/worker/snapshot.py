"""The host snapshot: what a rank needs to go back to an earlier step, in memory that the keeper holds.

Every rank keeps its 1/n share of the committed zone (replicas are equal, so the shares of all make the whole) and what is
its own: buffers, parameters that are not replicated, manifest, and its END slot. Two halves, written in turn, each sealed with its step:
a rank that dies while it writes one leaves the other, and since all ranks meet at every gate they have one in common.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftrun import native
from ftrun.core.errors import DeviceError, PlatformError
from ftrun.native.transfer import Extent, Facts
from ftrun.worker import moving
from ftrun.worker.arena import Arena, Manifest
from ftrun.worker.context import Context
from ftrun.worker.segment import Segment, room_for
from ftrun.worker.slots import END

if TYPE_CHECKING:
    from ftrun.worker.engine import Engine
    from ftrun.worker.state import Protected

NAME = "snapshot"  # of the segment at the keeper
_PAGE = 4096
_SEAL, _LENGTH, _SUM = 0, 8, 16  # words of a half's first page; behind it the facts, then the pieces
_FACTS_AT = _PAGE
_PIECES_AT = 1 << 20
_NO_STEP = -1


class BadSnapshot(Exception):
    """A snapshot cannot be used; the message says why."""


@dataclass(frozen=True)
class Piece:
    """Bytes [offset, offset + size) of a half, with their checksum."""

    offset: int
    size: int
    sum: int


@dataclass(frozen=True)
class Record:
    """One sealed half. `committed`: size of the committed zone; `layout`: hash of the manifest's committed part."""

    step: int
    world_size: int
    committed: int
    layout: int
    pieces: dict[str, Piece]

    @property
    def agrees(self) -> tuple[int, int, int]:
        """What must be equal in the snapshots of one step."""
        return self.world_size, self.committed, self.layout


class Store:
    """The snapshot segment of one rank."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._half = segment.length // 2

    @classmethod
    def create(cls, rank: int, arena: Arena) -> Store:
        return cls(Segment.create(f"snapshot-{rank}", 2 * (arena.segment.length + _PIECES_AT)))

    def steps(self) -> dict[int, int]:
        """Sealed steps (gate numbers) -> half."""
        seals = {half: self.segment.load(half * self._half + _SEAL) - 1 for half in (0, 1)}
        return {step: half for half, step in seals.items() if step >= 0}

    def write(self, step: int, facts: dict[str, Any], pieces: dict[str, Sequence[Extent] | bytes]) -> None:
        """Copy the pieces into the older half and seal it. Errors: DeviceError when there is no room."""
        sealed = self.steps()
        half = sealed[min(sealed)] if len(sealed) == 2 else (0 if 0 not in sealed.values() else 1)
        base = half * self._half
        self.segment.store(base + _SEAL, 0)
        at, written = _PIECES_AT, {}
        for name, extents in pieces.items():
            begin = at
            if isinstance(extents, bytes):
                self.segment.view(base + at, len(extents))[:] = extents
                at += len(extents)
            else:
                for address, size in extents:
                    native.copy(self.segment.address + base + at, address, size)
                    at += size
            written[name] = (begin, at - begin, native.checksum(self.segment.address + base + begin, at - begin))
            at = -(-at // _PAGE) * _PAGE
        data = json.dumps({**facts, "step": step, "pieces": written}).encode()
        self.segment.view(base + _FACTS_AT, len(data))[:] = data
        self.segment.store(base + _LENGTH, len(data))
        self.segment.store(base + _SUM, native.checksum(self.segment.address + base + _FACTS_AT, len(data)))
        self.segment.store(base + _SEAL, step + 1)

    def record(self, step: int) -> Record:
        """Errors: BadSnapshot."""
        half = self.steps().get(step)
        if half is None:
            raise BadSnapshot(f"there is no snapshot of step {step}")
        base = half * self._half
        length = self.segment.load(base + _LENGTH)
        at = self.segment.address + base + _FACTS_AT
        if length > _PIECES_AT - _FACTS_AT or native.checksum(at, length) != self.segment.load(base + _SUM):
            raise BadSnapshot(f"what describes the snapshot of step {step} does not match its checksum")
        raw = json.loads(bytes(self.segment.view(base + _FACTS_AT, length)))
        pieces = {name: Piece(base + offset, size, total) for name, (offset, size, total) in raw["pieces"].items()}
        return Record(raw["step"], raw["world_size"], raw["committed"], raw["layout"], pieces)

    def check(self, record: Record) -> None:
        """Errors: BadSnapshot when a piece is not what was written."""
        for name, piece in record.pieces.items():
            if native.checksum(self.segment.address + piece.offset, piece.size) != piece.sum:
                raise BadSnapshot(f"{name} in the snapshot of step {record.step} does not match its checksum")

    def extent(self, piece: Piece) -> Extent:
        return self.segment.address + piece.offset, piece.size

    def bytes(self, piece: Piece) -> bytes:
        return bytes(self.segment.view(piece.offset, piece.size))


class Snapshots:
    """Takes this rank's snapshots, every `every` steps; 0 = never."""

    def __init__(self, engine: Engine, every: int) -> None:
        self._engine = engine
        self._every = every
        self._store: Store | None = None
        self._room = 0  # bytes that each half has had room for

    @property
    def store(self) -> Store | None:
        return self._store

    def take_if_due(self, step: int) -> None:
        """Keep the state as of the start of gate step `step`, whose END slot is sealed, every so many steps.

        Without room that is said, once, and never tried again.
        """
        if self._every > 0 and self._engine.state.arena.has_gpu:
            self._every = 0
            if self._engine.context.rank == 0:
                print("ftrun: host snapshots of models on a GPU are not taken by this version", file=sys.stderr)
        if self._every <= 0 or (step - self._engine.base) % self._every:
            return
        try:
            self._take(step)
        except (DeviceError, PlatformError) as error:
            self._every = 0
            print(f"ftrun: rank {self._engine.context.rank}: no more host snapshots: {error}", file=sys.stderr)

    def _take(self, step: int) -> None:
        engine, context = self._engine, self._engine.context
        arena, world = engine.state.arena, context.world
        assert world is not None
        base = arena.segment.address
        begin, size = arena.committed
        offset, share = Facts(world.size, 1, size).share(_place(context))
        buffers, live = engine.state.live_buffers()
        pieces: dict[str, Sequence[Extent] | bytes] = {
            "share": [(base + begin + offset, share)],
            "buffers": [(base + buffers, live)],
            "private": [(base + at, length) for at, length in own_places(engine.state, engine.state.manifest)],
            "manifest": engine.state.manifest.to_bytes(),
            "slot": bytes(engine.ledger.slots.data(END)),
        }
        needed = sum(len(p) if isinstance(p, bytes) else sum(size for _, size in p) for p in pieces.values())
        more = max(0, needed - self._room)
        with room_for(2 * more, "a host snapshot"):
            fresh = self._store is None
            if self._store is None:
                self._store = Store.create(context.rank, arena)
            facts = {"world_size": world.size, "committed": size, "layout": layout_of(engine.state.manifest)}
            self._store.write(step, facts, pieces)
            self._room = max(self._room, needed)
        if fresh:
            with contextlib.suppress(OSError):  # the next keeper gets it with the other segments
                self.send()

    def adopt(self, store: Store) -> None:
        """Go on in a predecessor's segment."""
        self._store = store

    def handed_over(self) -> bool:
        """As `send`; False when there is no keeper now."""
        try:
            self.send()
        except OSError:
            return False
        return True

    def send(self) -> None:
        """Hand the segment to the keeper. Errors: OSError when there is none."""
        if self._store is not None:
            context = self._engine.context
            context.keeper.put(context.rank, NAME, context.cell.index, self._store.segment.fd)


def layout_of(manifest: Manifest) -> int:
    """Hash of names, types, shapes and places in the committed zone: equal where one copy fits the other."""
    rows = [(e.name, e.dtype, e.shape, e.offset, e.block) for e in manifest.entries if e.zone == "committed"]
    return int.from_bytes(hashlib.sha256(repr(rows).encode()).digest()[:8], "little")


def own_places(state: Protected, manifest: Manifest) -> list[tuple[int, int]]:
    """(offset, size) of what no other rank is known to have the same: private parameters, and all of a model without DDP."""
    replicated = {e.offset for e in state.replicated(manifest)}
    own = {e.offset: e.block for e in manifest.entries if e.zone == "committed" and e.offset not in replicated}
    return sorted(own.items())


def newest_common(context: Context) -> int:
    """Newest step of which every rank's snapshot is there and fits the others', -1 = none. Checks no contents."""
    world = context.world
    assert world is not None
    stores = [attach(context, place.rank) for place in world.places]
    found = [store for store in stores if store is not None]
    if len(found) < len(stores):
        return _NO_STEP
    common = set.intersection(*(set(store.steps()) for store in found))
    try:
        for step in sorted(common, reverse=True):
            records = [store.record(step) for store in found]
            if len({r.agrees for r in records}) == 1 and records[0].world_size == world.size:
                return step
    except (BadSnapshot, ValueError, KeyError):
        pass
    finally:
        for store in found:
            store.segment.close()
    return _NO_STEP


def attach(context: Context, rank: int) -> Store | None:
    """The kept snapshot of a rank, mapped; None when there is none, or no keeper."""
    try:
        fd = context.keeper.get(rank, NAME)
    except OSError:
        return None
    return Store(Segment.attach(fd)) if fd is not None else None


def _place(context: Context) -> int:
    world = context.world
    assert world is not None
    return next(i for i, p in enumerate(world.places) if p.cell == context.cell.index)


def reload(engine: Engine, arena: Arena) -> tuple[Manifest, dict[str, Any], int]:
    """Bring this rank's arena and slots back to the snapshot of the world's resume step, together with all ranks.

    Gives the manifest, the END slot's content, and the bytes moved. Errors: BadSnapshot, TransferError, Interrupt,
    DeviceError.
    """
    context = engine.context
    world = context.world
    assert world is not None
    step = world.resume
    store = engine.snapshots.store or attach(context, context.rank)
    if store is None:
        raise BadSnapshot("the keeper has no host snapshot of this rank")
    engine.snapshots.adopt(store)
    record = store.record(step)
    store.check(record)
    manifest = Manifest.from_bytes(store.bytes(record.pieces["manifest"]))
    arena.open()
    begin = arena.shape_committed(record.committed)
    facts = Facts(world.size, 1, record.committed, -1, world.generation, step, record.layout)
    moved = moving.host_reload(
        context, facts, [store.extent(record.pieces["share"])], [(arena.segment.address + begin, record.committed)]
    )
    _put_back(store, record, "private", arena, own_places(engine.state, manifest))
    live = record.pieces["buffers"].size
    if arena.volatile[1] < 2 * live:
        arena.reserve("volatile", 2 * live)  # an arena made for this restore
    _put_back(store, record, "buffers", arena, [(arena.volatile[0], live)])
    slots = engine.ledger.slots
    slots.forget_steps()
    slots.write(END, step, [store.bytes(record.pieces["slot"])])
    arena.write_manifest(manifest)
    arena.sealed(step)
    return manifest, engine.ledger.read(END), moved.copied


def _put_back(store: Store, record: Record, name: str, arena: Arena, places: list[tuple[int, int]]) -> None:
    at = store.segment.address + record.pieces[name].offset
    for offset, size in places:
        native.copy(arena.segment.address + offset, at, size)
        at += size


__all__ = ["BadSnapshot", "Snapshots", "attach", "newest_common", "reload"]
