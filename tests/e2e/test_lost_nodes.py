"""A node is lost: a spare node takes its place, and the run ends where an uninterrupted one ends."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.conftest import wait_for
from tests.e2e import over_nodes
from tests.e2e.harness import Outcome
from tests.e2e.test_over_nodes import Stock, all_exact

STEPS = ("--steps", "200", "--stretch", "0.02")
SOON = ("--rdzv-conf", "keep_alive=2")


def without(outcomes: list[Outcome], lost: int) -> list[Outcome]:
    return [outcome for node, outcome in enumerate(outcomes) if node != lost]


def test_a_spare_node_takes_the_place_of_a_lost_one(folder: Path, stock: Stock) -> None:
    begun = over_nodes.begin(folder, STEPS, options=SOON, spares=[2])
    wait_for(lambda: "this node is a spare" in begun[2].output, "a spare node")
    begun[1].process.send_signal(signal.SIGKILL)
    begun[1].wait(30.0)
    outcomes = over_nodes.end(begun[:1] + begun[2:])
    all_exact(outcomes, stock(*STEPS), struck=[1])
    assert "takes its place" in outcomes[0].output
