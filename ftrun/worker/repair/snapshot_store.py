"""The memory of one rank's host snapshot has two halves, each sealed with its step and checked when read."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

from ftrun import native
from ftrun.core.shared.snapshot_layout import FACTS_AT, HALVES, PAGE, PIECES_AT
from ftrun.native.transfer import Extent
from ftrun.worker.memory.arena import Arena
from ftrun.worker.memory.segment import Segment

_SEAL, _LENGTH, _SUM = 0, 8, 16  # words of a half's head


class BadSnapshot(Exception):
    """A snapshot cannot be used; the message says why."""


@dataclass(frozen=True)
class Places:
    """The places of a piece's bytes: (offset, size) after (offset, size) in an arena's host or GPU part."""

    arena: Arena
    rows: list[tuple[int, int]]
    on_gpu: bool = False

    @property
    def size(self) -> int:
        return sum(size for _, size in self.rows)

    def copy_out(self, to: int) -> None:
        """Copy the bytes to host memory at `to`.

        Raises:
            DeviceError
            CudaError
        """
        if self.on_gpu:
            self.arena.gpu_part.copy_out(to, self.rows)
            return
        for offset, size in self.rows:
            native.copy(to, self.arena.segment.address + offset, size)
            to += size

    def copy_in(self, source: int) -> None:
        """Copy the bytes from host memory at `source`.

        Raises:
            DeviceError
            CudaError
        """
        if self.on_gpu:
            self.arena.gpu_part.copy_in(source, self.rows)
            return
        for offset, size in self.rows:
            native.copy(self.arena.segment.address + offset, source, size)
            source += size


@dataclass(frozen=True)
class Piece:
    """Bytes [offset, offset + size) of a half, with their checksum."""

    offset: int
    size: int
    sum: int


@dataclass(frozen=True)
class Record:
    """One sealed half. `zone`, `zone_gpu`: sizes of the committed zone's two parts; `committed`, `committed_gpu`: the same if all
    ranks share the zone, else 0; `layout`: hash of its layout if they do, else 0."""

    step: int
    world_size: int
    zone: int
    zone_gpu: int
    committed: int
    committed_gpu: int
    layout: int
    pieces: dict[str, Piece]

    @property
    def agrees(self) -> tuple[int, ...]:
        """The values on which all snapshots of a step must agree."""
        return self.world_size, self.committed, self.committed_gpu, self.layout


class Store:
    """The snapshot segment of one rank."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._half = segment.length // 2

    @classmethod
    def create(cls, rank: int, arena: Arena) -> Store:
        return cls(Segment.create(f"snapshot-{rank}", 2 * (arena.segment.length + PIECES_AT)))

    def steps(self) -> dict[int, int]:
        """Map sealed steps (gate numbers) to their halves."""
        seals = {half: self.segment.load(half * self._half + _SEAL) - 1 for half in HALVES}
        return {step: half for half, step in seals.items() if step >= 0}

    def half_for(self, common: int) -> int:
        """Choose the half to write: an empty one, else the older one, never that of step `common`."""
        sealed = self.steps()
        empty = [half for half in HALVES if half not in sealed.values()]
        return empty[0] if empty else next(half for step, half in sorted(sealed.items()) if step != common)

    def discard(self, half: int) -> None:
        """Invalidate the snapshot in `half`."""
        self.segment.store(half * self._half + _SEAL, 0)

    def used(self) -> int:
        """Return the bytes in the larger sealed half; 0 if there is none, or a record is damaged."""
        with contextlib.suppress(BadSnapshot, ValueError, KeyError):
            return max((sum(p.size for p in self.record(step).pieces.values()) for step in self.steps()), default=0)
        return 0

    def write(self, half: int, step: int, facts: dict[str, Any], pieces: dict[str, Places | bytes]) -> None:
        """Copy the pieces into `half` and seal it.

        Raises:
            DeviceError: If the device does not finish its work.
            CudaError
        """
        base = half * self._half
        self.discard(half)
        at, written = PIECES_AT, {}
        for name, piece in pieces.items():
            if isinstance(piece, bytes):
                size = len(piece)
                self.segment.view(base + at, size)[:] = piece
            else:
                size = piece.size
                piece.copy_out(self.segment.address + base + at)
            written[name] = (at, size, native.checksum(self.segment.address + base + at, size))
            at = -(-(at + size) // PAGE) * PAGE
        data = json.dumps({**facts, "step": step, "pieces": written}).encode()
        self.segment.view(base + FACTS_AT, len(data))[:] = data
        self.segment.store(base + _LENGTH, len(data))
        self.segment.store(base + _SUM, native.checksum(self.segment.address + base + FACTS_AT, len(data)))
        self.segment.store(base + _SEAL, step + 1)

    def facts(self, step: int) -> list[tuple[int, int]]:
        """Return the place and the length of what describes a snapshot. Raises BadSnapshot."""
        half = self.steps().get(step)
        if half is None:
            raise BadSnapshot(f"there is no snapshot of step {step}")
        length = self.segment.load(half * self._half + _LENGTH)
        if length > PIECES_AT - FACTS_AT:
            raise BadSnapshot(f"what describes the snapshot of step {step} does not match its checksum")
        return [(half * self._half + FACTS_AT, length)]

    def record(self, step: int) -> Record:
        """Read the record of a snapshot. Raises BadSnapshot."""
        ((at, length),) = self.facts(step)
        base = at - FACTS_AT
        if native.checksum(self.segment.address + at, length) != self.segment.load(base + _SUM):
            raise BadSnapshot(f"what describes the snapshot of step {step} does not match its checksum")
        raw = json.loads(bytes(self.segment.view(at, length)))
        pieces = {name: Piece(base + offset, size, total) for name, (offset, size, total) in raw.pop("pieces").items()}
        return Record(pieces=pieces, **raw)

    def check(self, record: Record) -> None:
        """Raise BadSnapshot if a piece does not match its checksum."""
        for name, piece in record.pieces.items():
            if native.checksum(self.segment.address + piece.offset, piece.size) != piece.sum:
                raise BadSnapshot(f"{name} in the snapshot of step {record.step} does not match its checksum")

    def extent(self, piece: Piece) -> Extent:
        return self.segment.address + piece.offset, piece.size

    def bytes(self, piece: Piece) -> bytes:
        return bytes(self.segment.view(piece.offset, piece.size))
