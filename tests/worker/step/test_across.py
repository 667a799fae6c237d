"""What a node does with what the other nodes say at a gate: a real board, and another node's numbers in place of the all-reduce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftrun.core.errors import UsageError
from ftrun.core.shared.board import Board, Busy, F, Head, sum_word
from ftrun.core.shared.replicas import SumRow, name_of
from ftrun.core.shared.world import AllNodes, Place, World
from ftrun.worker.link.observer import Observers, StepObserver
from ftrun.worker.link.run_link import Context
from ftrun.worker.repair.mirrors import Mirrors
from ftrun.worker.step import across

NODES: Any = None  # the group that nobody asks here
STEP, LOOP_END = 0, int(Busy.AT_LOOP_END)
SIGN = 1 << 63


class Hears(StepObserver):
    rows: list[SumRow] | None = None
    answer = True

    def sums_gathered(self, number: int, rows: list[SumRow]) -> bool:
        self.rows = rows
        return self.answer


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """Rank 0 of a world of three ranks on two nodes: two here, one there."""
    board = Board.create(tmp_path / "board", 2)
    here = Context(tmp_path, 0)
    for rank in (0, 1):
        board.cell(rank)[F.RANK] = rank + 1
    span = AllNodes(3, (0, 2), 0, ("127.0.0.1", "127.0.0.1"), "round/0")
    here.world = World(1, 0, (Place(0, 0, 0), Place(1, 1, 1)), "", 0, span=span)
    return here


def at(monkeypatch: pytest.MonkeyPatch, number: int, kind: int = STEP, some: int = 0, kept: int = -1, copied: int = -1) -> None:
    """The other node stands at this gate, and its ranks have a host snapshot of gate number `kept`; it has made copies of `copied`."""
    place = number << across._KIND_BITS | kind
    theirs = [place, -place, some, 0, -kept, -copied - 1]
    monkeypatch.setattr(across.among_nodes, "greatest", lambda _, mine: list(map(max, mine, theirs)))


def test_nodes_at_one_gate_go_on(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, 7)
    assert across.all_here(context, NODES, Observers(), 7)


def test_a_stop_meanwhile(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across.among_nodes, "greatest", lambda *_: None)
    assert not across.all_here(context, NODES, Observers(), 7)


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (9, STEP, "one is 2 gates ahead"),
        (6, STEP, "one is 1 gate ahead"),
        (7, LOOP_END, "one in a step, one at the end of the loop"),
    ],
)
def test_nodes_at_different_gates(
    context: Context, monkeypatch: pytest.MonkeyPatch, number: int, kind: int, words: str
) -> None:
    at(monkeypatch, number, kind)
    with pytest.raises(UsageError, match=f"the nodes are not at the same place of the script: {words}; every rank makes the same steps"):
        across.all_here(context, NODES, Observers(), 7)


def test_checksums_of_all_ranks_by_their_ranks(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 made none for this gate; sums use all 64 bits."""
    cell, replicas = context.board.cell(0), name_of([0, 2])
    cell[F.REPLICAS], cell[F.SUM], cell[F.PYTHON_SUM], cell[F.SUM_AT] = replicas, 2**64 - 1, 5, sum_word(7, trusted=True)
    context.board.cell(1)[F.SUM_AT] = sum_word(6, trusted=False)
    at(monkeypatch, 7, some=1)

    def gathered(_: Any, mine: torch.Tensor) -> torch.Tensor:
        theirs = torch.tensor([[word - SIGN for word in row] for row in ((replicas, 3, 5, 0), (0, 0, 0, 0))])
        return torch.stack([mine, theirs])

    monkeypatch.setattr(across.among_nodes, "gathered", gathered)
    hears, observers = Hears(), Observers()
    observers.add(hears)
    assert across.all_here(context, NODES, observers, 7)
    assert hears.rows == [SumRow(0, replicas, 2**64 - 1, 5, trusted=True), SumRow(2, replicas, 3, 5, trusted=False)]
    hears.answer = False
    assert not across.all_here(context, NODES, observers, 7), "a rank is corrupt: the gate stays shut"


@pytest.mark.parametrize(("here", "there", "common"), [((4, 6), 4, 4), ((4, 4), 6, 4), ((6, 6), 6, 6), ((6, 6), -1, -1)])
def test_the_host_snapshot_that_every_rank_of_every_node_has_is_known(
    here: tuple[int, int], there: int, common: int, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 and rank 1 have the one before, too: nobody may overwrite it while a rank has no newer one."""
    context.snapshot_every = 2
    for cell, step in zip(context.cells(), here, strict=True):
        cell[F.FIRST_HALF], cell[F.FIRST_HALF + 1] = step + 1, 4 + 1
    at(monkeypatch, 7, kept=there)
    assert across.all_here(context, NODES, Observers(), 7)
    assert context.board[Head.SNAPSHOT] - 1 == common


class NoSlots(Mirrors):
    """Where spare nodes wait: mirrors that have nothing to send."""

    def exchange(self, nodes: Any) -> bool:
        return True


@pytest.mark.parametrize(
    ("here", "there", "copied"),
    [(4, 4, 4), (4, 2, 2), (2, 4, -1), (-1, 4, -1)],
    ids=["by both", "the other is behind", "of an earlier one", "by the other"],
)
def test_copies_count_when_all_nodes_have_made_those_of_the_newest_snapshot_of_all(
    here: int, there: int, copied: int, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the last gate: what this node copied before all went back counts for nothing."""
    context.snapshot_every = 2
    for cell in context.cells():
        cell[F.FIRST_HALF] = 4 + 1
    context.board[Head.SNAPSHOT], context.board[Head.COPIES_AT] = 4 + 1, here + 1
    at(monkeypatch, 7, kept=4, copied=there)
    assert across.all_here(context, NODES, Observers(), 7, NoSlots(context))
    assert context.board[Head.COPIED] - 1 == copied and context.board[Head.SNAPSHOT] - 1 == 4
