"""`ftrun drain` over several nodes: of a rank on another node, and of a whole node, whose place a spare node takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e import over_nodes
from tests.e2e.harness import Outcome, Running
from tests.e2e.over_nodes import all_exact
from tests.e2e.test_lost_nodes import begin
from tests.e2e.test_over_nodes import Stock

STEPS = ("--steps", "120", "--stretch", "0.05")


def drain(node: Running, *words: str) -> dict[str, object]:
    """What `ftrun drain --json` says on a node that could do it."""
    done = over_nodes.ask(node, "drain", *words, "--yes", "--json")
    assert done.returncode == 0, done.stdout + done.stderr + "\n" + node.output
    found: dict[str, object] = json.loads(done.stdout)
    return found


def nobody_restarted(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        assert not outcome.notes("world-broken") and "start again" not in outcome.output, outcome.tail()


@pytest.mark.slow
def test_a_rank_of_another_node(folder: Path, stock: Stock) -> None:
    begun = over_nodes.begin(folder, STEPS)
    over_nodes.until_gate(begun, 3)
    for asked, rank, node in ((0, 3, 1), (1, 0, 0)):
        said = drain(begun[asked], "--rank", str(rank))
        assert (said["moved"], said["rank"], said["node"]) == (True, rank, node) and said["from"] != said["to"]
    refused = over_nodes.ask(begun[0], "drain", "--rank", "7", "--yes")
    assert refused.returncode == 2 and "there is no rank 7: the run has ranks 0 to 3" in refused.stderr, refused.stderr
    outcomes = over_nodes.end(begun)
    all_exact(outcomes, stock(*STEPS), struck=[0, 1])
    nobody_restarted(outcomes)
    assert "rank 3 is to leave its worker, as asked on node 0" in outcomes[1].output
    assert "rank 3 leaves its worker before step" in outcomes[1].output


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "node"), [(0, 1), (1, 1), (1, 0)])
def test_a_node_gives_its_place_to_a_spare_one(asked: int, node: int, folder: Path, stock: Stock) -> None:
    """Also the one that leads and has the store in which the ranks meet; and asked on itself."""
    begun = begin(folder, STEPS)
    over_nodes.until_gate(begun[:2], 3)
    said = drain(begun[asked], "--node", str(node))
    assert (said["moved"], said["node"]) == (True, node)
    assert begun[node].wait(30.0) == 0
    drained = begun[node].output
    assert f"node {node} (" in drained and "this node's workers end, and the run goes on without it" in drained
    assert "bit-identical" not in drained and "done in" not in drained, "it does not know how the run ends"
    outcomes = over_nodes.end([one for number, one in enumerate(begun) if number != node])
    all_exact(outcomes, stock(*STEPS), struck=[1])
    nobody_restarted(outcomes)
    assert "is drained, and " in outcomes[0].output
    assert "this node takes the place of one that was drained" in outcomes[1].output


@pytest.mark.slow
def test_what_cannot_be_drained(folder: Path) -> None:
    begun = over_nodes.begin(folder, STEPS)
    over_nodes.until_gate(begun, 3)
    for words, why in (
        (("--node", "1"), "no spare node with 2 ranks waits to take the place of node 1"),
        (("--node", "2"), "there is no node 2: the run has nodes 0 to 1"),
        (("--node", "1", "--rank", "2"), "needs --rank R or --node N"),
    ):
        done = over_nodes.ask(begun[0], "drain", *words, "--yes")
        assert done.returncode == 2 and why in done.stderr, done.stderr
    assert [outcome.code for outcome in over_nodes.end(begun)] == [0, 0]
