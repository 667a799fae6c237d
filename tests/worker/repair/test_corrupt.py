"""A rank whose replica differs: known to be corrupt before anybody could copy from it, whatever its fence comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftrun.control import events as ev
from ftrun.core.shared.board import F, sum_word
from ftrun.core.shared.replicas import name_of
from ftrun.core.shared.world import Place, World
from ftrun.host.detect.detectors import Detectors
from ftrun.host.workers.pool import Worker, WorkerPool
from ftrun.worker.repair.sources import donors
from tests.host.parts import Recorder, launch_context


def test_one_that_comes_after_the_others_were_compared_is_compared(tmp_path: Path) -> None:
    """A replacement is the last at the gate: until it shows its checksum the others are a group of their own, and equal."""
    told: list[tuple[str, int]] = []

    def emit(event: ev.Event) -> None:
        if isinstance(event, ev.Died):
            told.append((event.fault, event.worker))

    nothing: Any = None
    context = launch_context(tmp_path, Recorder(emit), nproc=4)
    pool = WorkerPool(context, nothing, set)
    for rank in range(4):
        pool.workers[rank] = Worker(context.board.cell(rank), rank)

    def show(rank: int, checksum: int) -> None:
        cell = pool.workers[rank].cell
        cell[F.SUM], cell[F.REPLICAS] = checksum, 1
        cell[F.SUM_AT] = sum_word(5, True)

    detectors = Detectors(context, pool, nothing)
    try:
        for rank in (0, 2, 3):
            show(rank, 7)
        detectors.compare(1, list(pool.workers.values()))
        assert told == []
        show(1, 8)
        detectors.compare(1, list(pool.workers.values()))
    finally:
        detectors.close()
    assert told == [("corrupt", 1)]


def test_it_is_marked_before_its_death_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []

    def emit(event: ev.Event) -> None:
        if isinstance(event, ev.Died):
            cell = board.cell(event.worker)
            told.append((event.fault, cell[F.CORRUPT], cell[F.FENCED]))

    nothing: Any = None
    context = launch_context(tmp_path, Recorder(emit), nproc=4)
    board = context.board
    pool = WorkerPool(context, nothing, set)
    for rank in range(4):
        worker = pool.workers[rank] = Worker(board.cell(rank), rank)
        worker.cell[F.SUM] = 7 if rank != 2 else 8
        worker.cell[F.SUM_AT] = sum_word(5, True)
        worker.cell[F.REPLICAS] = 1
    detectors = Detectors(context, pool, nothing)
    try:
        detectors.compare(1, list(pool.workers.values()))
    finally:
        detectors.close()
    assert told == [("corrupt", 1, 0)], "a replacement that is told of the world later finds the mark, fence or not"
    world = World(2, 6, tuple(Place(r, r, r + 4) for r in range(4)), "", 0, replaced=(1, 2), lost={1: 1, 2: 2})
    assert donors(board, world, 1) == [3, 0]
    assert donors(board, world, 3) == [0, 1], "rank 1 died beside it, and what it left may be whole"


def test_of_replicas_on_several_nodes_the_launcher_replaces_those_that_a_rank_marked(tmp_path: Path) -> None:
    """Two of three ranks here are corrupt, and six of eight in all say so: the sound one is not outvoted."""
    told: list[tuple[str, int, str]] = []

    def emit(event: ev.Event) -> None:
        if isinstance(event, ev.Died):
            told.append((event.fault, event.worker, event.evidence))

    nothing: Any = None
    context = launch_context(tmp_path, Recorder(emit), nproc=3)
    board = context.board
    pool = WorkerPool(context, nothing, set)
    for rank in range(3):
        worker = pool.workers[rank] = Worker(board.cell(rank), rank)
        worker.cell[F.SUM], worker.cell[F.REPLICAS] = 8 if rank else 7, name_of(range(8))
        worker.cell[F.SUM_AT] = sum_word(5, True)
    detectors = Detectors(context, pool, nothing)
    try:
        detectors.compare(1, list(pool.workers.values()))
        assert told == []
        board.cell(1)[F.CORRUPT] = board.cell(2)[F.CORRUPT] = 1
        world = World(1, 5, tuple(Place(r, r, r) for r in range(3)), "", 0)
        assert donors(board, world, 1) == [0], "another rank's death stopped the world before they were condemned"
        detectors.compare(1, list(pool.workers.values()))
        detectors.compare(1, [worker for worker in pool.workers.values() if not worker.reported])
    finally:
        detectors.close()
    assert [(fault, worker) for fault, worker, _ in told] == [("corrupt", 1), ("corrupt", 2)]
    assert all("differs from that of most of 8 ranks on all nodes at the gate of step" in evidence for *_, evidence in told)
