"""Checksums of replicas, compared by the rank that opens the gate: real boards, a state that is one number a rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ftrun.core.shared.board import Board, F, Head, sum_of
from ftrun.core.shared.replicas import SumRow, sum_row
from ftrun.core.shared.world import AllNodes, Place, World
from ftrun.worker.link.run_link import Context
from ftrun.worker.step.replica_check import ReplicaCheck

RANKS = 4
NO_OPTIMIZER: Any = None


class Rank:
    """A rank in cell `cells[rank]`, one of `ranks` that hold the same: `value` is the checksum of its weights."""

    def __init__(self, folder: Path, rank: int, cells: list[int], value: int = 7, ranks: int = RANKS) -> None:
        self.context = Context(folder, cells[rank])
        self.context.cell[F.RANK] = rank + 1
        self.meet(1, cells)
        self.value = value
        holders = SimpleNamespace(
            comparable=lambda: frozenset(range(ranks)), entries=lambda *_: [None], rest_on_word=False, by_word=False
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


class Node:
    """Node `number` of `nodes` with two ranks each."""

    def __init__(self, folder: Path, number: int, nodes: int = 2) -> None:
        self.board, self.first = Board.create(folder / "board", 2), 2 * number
        self.ranks = [Rank(folder, cell, [0, 1], ranks=2 * nodes) for cell in (0, 1)]
        span = AllNodes(2 * nodes, tuple(range(0, 2 * nodes, 2)), number, ("127.0.0.1",) * nodes, "round/0")
        for rank in self.ranks:
            rank.context.cell[F.RANK] += self.first
            rank.context.world = World(1, 0, (Place(self.first, 0, 0), Place(self.first + 1, 1, 1)), "", 0, span=span)

    def reach(self, number: int) -> list[SumRow]:
        for rank in self.ranks:
            rank.reach(number)
            assert rank.check.may_open(number), "which of this node's ranks are corrupt the other nodes know, too"
        return [row for rank in self.ranks if (row := sum_row(rank.context.cell, number))]

    def corrupt(self) -> list[int]:
        return [self.first + cell for cell in (0, 1) if self.board.cell(cell)[F.CORRUPT]]


def nodes_of(folder: Path, count: int) -> list[Node]:
    folders = [folder / str(number) for number in range(count)]
    for own in folders:
        own.mkdir()
    return [Node(own, number, count) for number, own in enumerate(folders)]


def gate_opens(nodes: list[Node], number: int) -> bool:
    """Let all ranks arrive, and the first of each node judge what all nodes have gathered."""
    rows = [row for node in nodes for row in node.reach(number)]
    (answer,) = {node.ranks[0].check.sums_gathered(number, rows) for node in nodes}
    return answer


def test_most_ranks_of_all_nodes_say_who_is_corrupt(tmp_path: Path) -> None:
    """One of two ranks of its node: every node keeps its gate shut, and the one whose rank it is marks it."""
    here, there = nodes = nodes_of(tmp_path, 2)
    assert gate_opens(nodes, 0)
    there.ranks[1].value = 8
    assert not gate_opens(nodes, 1)
    assert here.corrupt() == [] and there.corrupt() == [3]
    for node in nodes:
        assert node.board[Head.EQUAL] and not node.board[Head.DIFFER], "the others still know that all had been equal"


def test_a_node_whose_ranks_are_all_corrupt_and_equal(tmp_path: Path) -> None:
    nodes = nodes_of(tmp_path, 3)
    assert gate_opens(nodes, 0)
    for rank in nodes[1].ranks:
        rank.value = 8
    assert not gate_opens(nodes, 1)
    assert [node.corrupt() for node in nodes] == [[], [2, 3], []]


def test_as_many_against_as_many_are_no_majority(tmp_path: Path) -> None:
    here, there = nodes = nodes_of(tmp_path, 2)
    assert gate_opens(nodes, 0)
    for rank in there.ranks:
        rank.value = 8
    assert gate_opens(nodes, 1)
    assert there.corrupt() == [] and there.board[Head.DIFFER] == 2 and not here.board[Head.EQUAL]


def test_a_majority_over_nodes_that_never_was_equal_says_nothing(tmp_path: Path) -> None:
    nodes = nodes_of(tmp_path, 2)
    nodes[1].ranks[1].value = 8
    assert gate_opens(nodes, 0) and gate_opens(nodes, 1)
    assert nodes[1].corrupt() == [] and nodes[1].board[Head.DIFFER] == 1
