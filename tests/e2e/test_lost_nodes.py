"""A node is lost: a spare node takes its place, and the run ends where an uninterrupted one ends."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.e2e import over_nodes
from tests.e2e.harness import Outcome, Running, fault, kill
from tests.e2e.test_over_nodes import Stock, all_exact

STEPS = ("--steps", "60", "--stretch", "0.05")
SOON = ("--rdzv-conf", "keep_alive=2")
LATE = 50  # a step that comes after the spare node


def lose(rank: int, at: str, step: int = LATE) -> str:
    return fault("node-kill", rank, at, step)


def begin(folder: Path, arguments: Sequence[str], faults: Sequence[str] = (), options: Sequence[str] = (), **more: object) -> list[Running]:
    """Start a run with a spare node of two ranks, and wait until that node waits."""
    begun = over_nodes.begin(folder, arguments, faults, options=(*SOON, *options), **{"spares": [2], **more})  # type: ignore[arg-type]
    wait_for(lambda: all("this node is a spare" in one.output for one in begun[2:]), "a spare node")
    return begun


def end(begun: list[Running], lost: int) -> list[Outcome]:
    """Wait for the end of all nodes; return the outcomes of those that were not lost, the spare one last."""
    begun[lost].wait(60.0)
    return over_nodes.end([one for node, one in enumerate(begun) if node != lost])


def test_a_spare_node_takes_the_place_of_a_lost_one(folder: Path, stock: Stock) -> None:
    begun = begin(folder, STEPS, [lose(2, "backward")])
    outcomes = end(begun, 1)
    all_exact(outcomes, stock(*STEPS), struck=[1])
    assert "node 1 (" in outcomes[0].output and "takes its place" in outcomes[0].output
    assert f"step {LATE}; state copied from another node" in outcomes[1].output, outcomes[1].tail()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("phase", ["forward", "gate", "update", "idle"])
def test_a_node_is_lost_anywhere(phase: str, rank: int, folder: Path, stock: Stock) -> None:
    """Node 0 leads, and has the store in which the ranks meet."""
    steps = (*STEPS, "--accum", "across", "--data", "loader")
    all_exact(end(begin(folder, steps, [lose(rank, phase)]), rank // 2), stock(*steps), struck=[1])


@pytest.mark.slow
def test_only_the_launcher_dies(folder: Path, stock: Stock) -> None:
    begun = begin(folder, STEPS)
    begun[1].process.send_signal(signal.SIGKILL)
    all_exact(end(begun, 1), stock(*STEPS), struck=[1])


@pytest.mark.slow
def test_a_rank_dies_beside_the_node(folder: Path, stock: Stock) -> None:
    begun = begin(folder, STEPS, [lose(2, "backward"), kill(1, "backward", LATE)])
    all_exact(end(begun, 1), stock(*STEPS), struck=[0, 1])


@pytest.mark.slow
def test_the_next_rank_dies_on_the_spare_node(folder: Path, stock: Stock) -> None:
    """A node that took a place is a node like the others: its memory serves, and it is mirrored."""
    begun = begin(folder, ("--steps", "80", "--stretch", "0.05"), [lose(2, "update"), kill(0, "update", 65)])
    all_exact(end(begun, 1), stock("--steps", "80", "--stretch", "0.05"), struck=[0, 1])
