"""Nothing moves on several nodes: who holds the world up is replaced, or all connect anew, and the run ends as an undisturbed one."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ftrun.core import paths
from tests.conftest import wait_for
from tests.e2e import lan as lans
from tests.e2e import over_nodes, test_subgroups
from tests.e2e.harness import Outcome, Running, fault
from tests.e2e.test_over_nodes import STEPS, Stock, all_exact

SOON = ("--hang-timeout", "2")


def accused(outcomes: Sequence[Outcome]) -> list[tuple[int, str, str]]:
    """The node of each rank that was judged, the fault, and why."""
    dead = [(node, event) for node, one in enumerate(outcomes) for event in one.events("Died")]
    return [(node, event["fault"], event["evidence"]) for node, event in dead if event["fault"] in ("hang", "collective", "gil")]


def test_the_only_rank_of_a_node_is_busy_for_ever(folder: Path, stock: Stock) -> None:
    begun = over_nodes.begin(folder, STEPS, [fault("hang", 1, "backward", 6)], nodes=(1, 1), options=SOON)
    outcomes = over_nodes.end(begun, ranks=2)
    all_exact(outcomes, stock(*STEPS, ranks=2), struck=[1])
    ((node, kind, why),) = accused(outcomes)
    assert (node, kind) == (1, "hang")
    assert "; rank 0 waits for it in allreduce #" in why, "node 0 told what its rank waits in"
    assert [1] in [stall["culprits"] for stall in outcomes[0].notes("stall")], "and people there were told who holds it up"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 3), (0, 1), (3,)], ids=str)
def test_ranks_of_a_node_are_busy_for_ever(ranks: tuple[int, ...], folder: Path, stock: Stock) -> None:
    """All of a node's, also of the first one, which others learn from what they are told; and one beside another that waits."""
    outcomes = over_nodes.end(over_nodes.begin(folder, STEPS, [fault("hang", rank, "backward", 6) for rank in ranks], options=SOON))
    node = ranks[0] // 2
    all_exact(outcomes, stock(*STEPS), struck=[node])
    assert [found[:2] for found in accused(outcomes)] == [(node, "hang")] * len(ranks)


@pytest.mark.slow
def test_a_rank_leaves_out_what_a_rank_of_another_node_waits_in(folder: Path) -> None:
    """All of them wait, each node for the other: ranks 1 and 3 in a group of theirs with rank 2, which is in the world's with rank 0."""
    script = folder / "train.py"
    script.write_text(test_subgroups.SCRIPT.replace("sys.argv[1]", "sys.argv[3]").replace("sys.argv[2]", "sys.argv[4]"))
    outcomes = over_nodes.end(over_nodes.begin(folder / "run", ("skip", "0"), script=script), ranks=0)
    ((node, kind, why),) = accused(outcomes)
    assert (node, kind) == (1, "collective"), outcomes[1].tail()
    assert why.startswith("ranks 1, 3 have waited in allreduce #1 among ranks 1-3 of step 8 for"), why
    assert [one.code for one in outcomes] == [0, 0] and not any(one.events("Stuck") for one in outcomes)
    assert test_subgroups.result(outcomes[0]) == test_subgroups.result(test_subgroups.run(folder / "clean", "all", []))


@pytest.mark.slow
@lans.needs_lan
def test_packets_between_two_nodes_are_lost_without_a_word(folder: Path, stock: Stock) -> None:
    """Nobody is to blame: all connect anew, nobody is replaced."""
    steps = ("--steps", "60", "--stretch", "0.02")
    with lans.lan(2) as lan:
        begun = over_nodes.begin(folder, steps, lan=lan, options=SOON)
        over_nodes.until_gate(begun, 10)
        lan.plug(1, into=False)
        wait_for(lambda: "making all connections again" in begun[0].output, "a suspicion of the links")
        time.sleep(2.0)  # the new connections wait for the cable, too
        lan.plug(1, into=True)
        outcomes = over_nodes.end(begun)
    all_exact(outcomes, stock(*steps))
    assert accused(outcomes) == []
    assert [len(one.events("Stuck")) for one in outcomes] == [1, 0]
    for one in outcomes:
        assert [order["replaced"] for order in one.actions("Publish")] == [[], []], one.tail()
    (incident,) = outcomes[0].notes("incident")
    assert incident["fault"] == "link" and not outcomes[1].notes("incident")


def all_wait(begun: Sequence[Running]) -> bool:
    """Does each node know of all that they show where their ranks wait?"""
    shown = [json.loads((one.run_dir() / paths.NODES).read_text()) for one in begun]
    return all(node["shows"].get("waits") for nodes in shown for node in nodes)


@pytest.mark.slow
@lans.needs_lan
def test_a_slow_network_is_no_fault(folder: Path, stock: Stock) -> None:
    """Reductions of seconds where steps took milliseconds, with the patience that is learned from those: nobody is judged."""
    steps = ("--steps", "60", "--stretch", "0.01")
    with lans.lan(2) as lan:
        begun = over_nodes.begin(folder, steps, lan=lan)
        over_nodes.until_gate(begun, 20)
        lan.slow(1, True)
        wait_for(lambda: all_wait(begun), "a world that stands still", 30.0)
        time.sleep(8.0)  # nobody is judged meanwhile
        lan.slow(1, False)
        outcomes = over_nodes.end(begun)
    all_exact(outcomes, stock(*steps))
    assert not any(one.notes("incident") or one.events("Stuck") for one in outcomes)
