"""Reads and writes world files: the ranks and workers of one generation. The launcher writes each once, and removes old ones."""

from __future__ import annotations

import bisect
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ftrun.core.errors import PlatformError
from ftrun.core.shape import loads, typed
from ftrun.core.shared.board import Board, Head
from ftrun.core.system import files


@dataclass(frozen=True)
class Place:
    """One rank and the worker incarnation (board cell) that holds it."""

    rank: int
    local_rank: int
    cell: int


@dataclass(frozen=True)
class AllNodes:
    """A world over several nodes. `size`: all of its ranks; `firsts`: the first rank of each node, which speaks for the node.

    `node`: this node's index; `addresses`: where the others reach each node; `ports`: where each node serves its memory to those that
    know `secret`, 0 = nowhere. `meeting`: a part of the keys in the store that is equal on every node, and unique. `replaced`: the ranks
    of all nodes whose worker is new. `mirrored`: each node keeps the slots of the ranks of the one before it, since a spare node may take
    that one's place.
    """

    size: int
    firsts: tuple[int, ...]
    node: int
    addresses: tuple[str, ...]
    meeting: str
    ports: tuple[int, ...] = ()
    secret: str = field(default="", repr=False)
    replaced: tuple[int, ...] = ()
    mirrored: bool = False

    def mirror_of(self, rank: int) -> tuple[str, int] | None:
        """Return host and port of the node that keeps the slots of `rank`, beside its own node; None if none does, or serves it."""
        node = bisect.bisect(self.firsts, rank) % len(self.firsts)  # the next one
        return self._served(node) if self.mirrored and len(self.firsts) > 1 else None

    def memory_of(self, rank: int) -> tuple[str, int] | None:
        """Return host and port at which the node of `rank` serves its memory; None if it does not."""
        return self._served(bisect.bisect(self.firsts, rank) - 1)

    def _served(self, node: int) -> tuple[str, int] | None:
        port = self.ports[node] if node < len(self.ports) else 0
        return (self.addresses[node], port) if port else None


@dataclass(frozen=True)
class World:
    """A generation. `resume` is a gate number; `replaced` are ranks whose worker is new and must restore.

    `tail`: no rank is stopped; the replaced ranks died after the loop and only run the script's end again.
    `fresh`: every worker starts its script anew and restores nothing (first start, or a restart of the world).
    `group_rank` is this node's index among several.
    `rollback`: all ranks go back to the host snapshot of step `resume`.
    `devices`: CUDA_VISIBLE_DEVICES of the workers, in the order of LOCAL_RANK; () = the launcher's value.
    `stamp` is equal on every node, and unique among runs of the same id, restarts and rollbacks.
    `lost` maps each replaced rank to the cell of the incarnation that died, unless that was on another node.
    `places`, `replaced` and `lost` have this node's ranks only, by their ranks in the world; `span`: of several nodes, else None.
    """

    generation: int
    resume: int
    places: tuple[Place, ...]
    store_host: str
    store_port: int
    replaced: tuple[int, ...] = ()
    lost: dict[int, int] | None = None
    tail: bool = False
    fresh: bool = False
    attempt: int = 0
    group_rank: int = 0
    rollback: bool = False
    devices: tuple[str, ...] = ()
    stamp: str = ""
    span: AllNodes | None = None

    @property
    def size(self) -> int:
        """Return the number of all ranks, also of those on other nodes."""
        return len(self.places) if self.span is None else self.span.size

    @property
    def here(self) -> frozenset[int]:
        """Return this node's ranks."""
        return frozenset(place.rank for place in self.places)

    def rank_of(self, cell: int) -> int | None:
        """Return the rank of incarnation `cell` in this world, None if it has none."""
        return next((p.rank for p in self.places if p.cell == cell), None)

    def cell_of(self, rank: int) -> int:
        """Return the incarnation that holds `rank`; raise KeyError if there is no such rank."""
        for place in self.places:
            if place.rank == rank:
                return place.cell
        raise KeyError(rank)

    def everyone(self, board: Board, stage: int) -> bool:
        """Has every rank of this node answered `stage` of this generation (or of a later one)?"""
        return all(board.cell(p.cell)[stage] >= self.generation for p in self.places)

    def prefix(self) -> str:
        """Return the prefix of this generation's store keys."""
        return f"ftrun/{self.attempt}/{self.generation}" if self.span is None else f"ftrun/{self.span.meeting}"


def world_path(run_dir: Path, generation: int) -> Path:
    return run_dir / f"world-{generation}.json"


def write_world(run_dir: Path, world: World) -> None:
    """Write the world file, whole or not at all; raise OSError if it cannot be written."""
    files.replace(world_path(run_dir, world.generation), json.dumps(asdict(world)), private=True)


def read_world(run_dir: Path, generation: int) -> World:
    """Read a world file; raise FileNotFoundError before it is published, PlatformError if it is damaged."""
    path = world_path(run_dir, generation)
    try:
        world = typed(World, loads(path.read_bytes()))
    except ValueError:
        world = None
    if world is None:
        raise PlatformError(f"{path} is damaged: it is no world of this version of ftrun; end the run and start it again")
    return world


def newest_world(run_dir: Path, board: Board) -> World:
    """Return the newest published world; the caller knows that one was published.

    Raises:
        FileNotFoundError: The run's folder is gone.
        PlatformError: The world file is damaged.
    """
    while True:
        published = board[Head.PUBLISHED]
        try:
            return read_world(run_dir, published)
        except FileNotFoundError:
            if board[Head.PUBLISHED] == published:
                raise


def forget_world(run_dir: Path, generation: int) -> None:
    """Remove the file of a world that no worker uses any more."""
    world_path(run_dir, generation).unlink(missing_ok=True)
