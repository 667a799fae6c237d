"""A rank whose replica differs: known to be corrupt before anybody could copy from it, whatever its fence comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftrun.control import events as ev
from ftrun.core.shared.board import F, sum_word
from ftrun.core.shared.replicas import name_of
from ftrun.core.shared.world import Place, World
from ftrun.host.detect.detectors import Detectors
from ftrun.host.workers.pool import Worker, WorkerPool
from ftrun.worker.repair.sources import donors
from tests.host.parts import Recorder, launch_context


class Scene:
    """The ranks of a node at gate 5, and its detectors."""

    def __init__(self, folder: Path, ranks: int) -> None:
        nothing: Any = None
        self.told: list[tuple[ev.Died, int, int]] = []  # with F.CORRUPT and F.FENCED at that moment
        context = launch_context(folder, Recorder(self._hear), nproc=ranks)
        self.board, self.pool = context.board, WorkerPool(context, nothing, set)
        for rank in range(ranks):
            self.pool.workers[rank] = Worker(self.board.cell(rank), rank)
        self.detectors = Detectors(context, self.pool, nothing)

    def _hear(self, event: ev.Event) -> None:
        if isinstance(event, ev.Died):
            cell = self.board.cell(event.worker)
            self.told.append((event, cell[F.CORRUPT], cell[F.FENCED]))

    def show(self, rank: int, checksum: int, replicas: int = 1) -> None:
        cell = self.board.cell(rank)
        cell[F.SUM], cell[F.REPLICAS], cell[F.SUM_AT] = checksum, replicas, sum_word(5, True)

    def compare(self) -> list[tuple[str, int]]:
        """What was told so far, after another look."""
        self.detectors.compare(1, [worker for worker in self.pool.workers.values() if not worker.reported])
        return [(event.fault, event.worker) for event, *_ in self.told]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[[int], Scene]]:
    made: list[Scene] = []

    def make(ranks: int) -> Scene:
        made.append(Scene(tmp_path, ranks))
        return made[-1]

    yield make
    for one in made:
        one.detectors.close()


def test_one_that_comes_after_the_others_were_compared_is_compared(scene: Callable[[int], Scene]) -> None:
    """A replacement is the last at the gate: until it shows its checksum the others are a group of their own, and equal."""
    node = scene(4)
    for rank in (0, 2, 3):
        node.show(rank, 7)
    assert node.compare() == []
    node.show(1, 8)
    assert node.compare() == [("corrupt", 1)]


def test_it_is_marked_before_its_death_is_told(scene: Callable[[int], Scene]) -> None:
    node = scene(4)
    for rank in range(4):
        node.show(rank, 7 if rank != 2 else 8)
    assert node.compare() == [("corrupt", 2)]
    assert node.told[0][1:] == (1, 0), "a replacement that is told of the world later finds the mark, fence or not"
    world = World(2, 6, tuple(Place(r, r, r + 4) for r in range(4)), "", 0, replaced=(1, 2), lost={1: 1, 2: 2})
    assert donors(node.board, world, 1) == [3, 0]
    assert donors(node.board, world, 3) == [0, 1], "rank 1 died beside it, and what it left may be whole"


def test_of_replicas_on_several_nodes_the_launcher_replaces_those_that_a_rank_marked(scene: Callable[[int], Scene]) -> None:
    """Two of three ranks here are corrupt, and six of eight in all say so: the sound one is not outvoted."""
    node = scene(3)
    for rank in range(3):
        node.show(rank, 8 if rank else 7, name_of(range(8)))
    assert node.compare() == []
    node.board.cell(1)[F.CORRUPT] = node.board.cell(2)[F.CORRUPT] = 1
    world = World(1, 5, tuple(Place(r, r, r) for r in range(3)), "", 0)
    assert donors(node.board, world, 1) == [0], "another rank's death stopped the world before they were condemned"
    assert node.compare() == [("corrupt", 1), ("corrupt", 2)]
    assert node.compare() == [("corrupt", 1), ("corrupt", 2)], "each once"
    words = "differs from that of most of 8 ranks on all nodes at the gate of step"
    assert all(words in event.evidence for event, *_ in node.told)
