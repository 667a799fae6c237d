"""Checksums of replicas, compared by the rank that opens the gate: real boards, a state that is one number a rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ftrun.core.shared.board import Board, F, Head, sum_of
from ftrun.core.shared.world import Place, World
from ftrun.worker.link.run_link import Context
from ftrun.worker.step.replica_check import ReplicaCheck

RANKS = 4
NO_OPTIMIZER: Any = None


class Rank:
    """Rank `rank` of four that hold the same: `value` is the checksum of its weights."""

    def __init__(self, folder: Path, rank: int, cells: list[int], value: int = 7) -> None:
        self.context = Context(folder, cells[rank])
        self.context.cell[F.RANK] = rank + 1
        self.meet(1, cells)
        self.value = value
        holders = SimpleNamespace(
            comparable=lambda: frozenset(range(RANKS)), entries=lambda *_: [None], rest_on_word=False, by_word=False
        )
        state: Any = SimpleNamespace(
            holders=holders,
            manifest=None,
            arena=SimpleNamespace(checksum=lambda _entry, before: before + self.value),
            python=SimpleNamespace(hyperparameters=lambda: [b"lr"]),
        )
        self.check = ReplicaCheck(self.context, state, 100)

    def meet(self, generation: int, cells: list[int]) -> None:
        self.context.world = World(generation, 0, tuple(Place(r, r, c) for r, c in enumerate(cells)), "", 0)

    def reach(self, number: int) -> None:
        self.check.gate_reached(number, NO_OPTIMIZER, [])


def test_a_rank_that_opened_every_gate_takes_nothing_along_when_it_dies(tmp_path: Path) -> None:
    """Only rank 1 compared; its replacement is the one that differs, and the three others know that all had been equal."""
    Board.create(tmp_path / "board", RANKS + 1)
    ranks = [Rank(tmp_path, rank, [0, 1, 2, 3]) for rank in range(RANKS)]
    for number in (0, 1):
        for rank in ranks:
            rank.reach(number)
        assert ranks[1].check.may_open(number)
    assert ranks[0].context.board[Head.EQUAL] == 1
    ranks[1] = Rank(tmp_path, 1, [0, 4, 2, 3], value=8)
    for rank in ranks:
        rank.meet(2, [0, 4, 2, 3])
        rank.reach(6)
    assert [sum_of(rank.context.cell[F.SUM_AT])[1] for rank in ranks] == [True, False, True, True]
    assert not ranks[3].check.may_open(6), "the launcher is to replace rank 1 first"
    assert not ranks[3].context.board[Head.DIFFER]


def test_what_never_was_equal_has_no_majority(tmp_path: Path) -> None:
    Board.create(tmp_path / "board", RANKS)
    ranks = [Rank(tmp_path, rank, [0, 1, 2, 3], value=8 if rank == 1 else 7) for rank in range(RANKS)]
    for number in (0, 1):
        for rank in ranks:
            rank.reach(number)
        assert ranks[0].check.may_open(number)
    assert ranks[0].context.board[Head.EQUAL] == 0 and ranks[0].context.board[Head.DIFFER] == 1
