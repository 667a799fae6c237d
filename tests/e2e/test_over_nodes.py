"""Repair in place over several nodes: a worker dies on one of them, and all go on together, to the end of an uninterrupted run."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.e2e import harness, over_nodes, sharding
from tests.e2e import lan as lans
from tests.e2e.harness import Outcome, fault, kill
from tests.e2e.over_nodes import all_exact
from tests.host.nodes.etcds import RealEtcd, needs_etcd
from tests.host.nodes.kube import NAMESPACE, OwnKubernetes
from tests.host.nodes.share import Share, needs_fuse

STEPS = ("--steps", "12")
OFTEN = ("--check-every", "1")
EVERY_2 = ("--snapshot-every", "2")
Stock = Callable[..., Outcome]


def given_ranks() -> tuple[str, ...]:
    """Options for nodes that are numbered in the order in which they begin."""
    return ("--master-addr", "127.0.0.1", "--master-port", str(harness.free_port()), "--node-rank", "{node}")


def corrupt_ones(outcomes: Sequence[Outcome]) -> list[list[int]]:
    """The ranks that each node replaced because their weights were corrupt."""
    victims = [[one for note in outcome.notes("incident") for one in note["victims"]] for outcome in outcomes]
    return [sorted(one["rank"] for one in those if one["fault"] == "corrupt") for those in victims]


def test_a_rank_dies_in_its_backward(folder: Path, stock: Stock) -> None:
    begun = over_nodes.begin(folder, STEPS, [kill(2, "backward", 6)])
    outcomes = over_nodes.end(begun)
    all_exact(outcomes, stock(*STEPS), struck=[1])
    here, there = outcomes[1].output, outcomes[0].output
    assert "takes over rank 2; step 6 again; state adopted in place" in here
    assert "rank 2 on node 1 (" in there and "; this node stops with it, and they go on together" in there
    assert "all replicas equal after the last step" in there
    assert "fault did not fire" not in here + there, "rank 2 is no rank of node 0"


@pytest.mark.slow
def test_the_only_rank_of_a_node_dies_in_its_update(folder: Path, stock: Stock) -> None:
    begun = over_nodes.begin(folder, STEPS, [kill(1, "update", 6)], nodes=(1, 1))
    outcomes = over_nodes.end(begun, ranks=2)
    all_exact(outcomes, stock(*STEPS, ranks=2), struck=[1])
    assert "takes over rank 1; going on with step 7; state copied from another node" in outcomes[1].output


def test_a_corrupt_rank_is_outvoted_by_those_of_all_nodes(folder: Path, stock: Stock) -> None:
    """On its own node there is one rank against one."""
    begun = over_nodes.begin(folder, STEPS, [fault("bitflip", 3, "forward", 6)], options=OFTEN)
    outcomes = over_nodes.end(begun)
    all_exact(outcomes, stock(*STEPS), struck=[1])
    assert corrupt_ones(outcomes) == [[], [3]]
    why = "rank 3 became corrupt .* differs from that of most of 4 ranks on all nodes at the gate of step 6"
    assert re.search(why, outcomes[1].output), outcomes[1].tail()
    assert "takes over rank 3; step 6 again; state copied from a peer" in outcomes[1].output, outcomes[1].tail()
    assert "all replicas equal after the last step" in outcomes[0].output, outcomes[0].tail()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "phase", "struck"),
    [
        ((2, 2, 2), "forward", {4: 2, 5: 2}),  # both ranks of a node: no replica here to copy from
        ((2, 2, 2), "idle", {0: 0, 3: 1}),
        ((1, 1, 2, 2), "update", {0: 0, 3: 2}),
        ((3, 4), "forward", {0: 0, 2: 0}),  # most ranks of a node
        ((1, 1, 1), "gate", {0: 0}),
    ],
    ids=str,
)
def test_corrupt_ranks_anywhere(
    nodes: tuple[int, ...], phase: str, struck: dict[int, int], folder: Path, stock: Stock
) -> None:
    begun = over_nodes.begin(
        folder, STEPS, [fault("bitflip", rank, phase, 5) for rank in struck], nodes=nodes, options=OFTEN, backend=given_ranks()
    )
    outcomes = over_nodes.end(begun, ranks=sum(nodes))
    all_exact(outcomes, stock(*STEPS, ranks=sum(nodes)), struck=[*struck.values()])
    assert corrupt_ones(outcomes) == [[rank for rank, at in struck.items() if at == node] for node in range(len(nodes))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "struck"),
    [((1, 1), [1]), ((2, 2), [2, 3])],
    ids=str,
)
def test_without_a_majority_nobody_is_replaced(nodes: tuple[int, ...], struck: list[int], folder: Path) -> None:
    faults = [fault("bitflip", rank, "forward", 6) for rank in struck]
    begun = over_nodes.begin(folder, STEPS, [*faults, kill(0, "backward", 9)], nodes=nodes, options=OFTEN)
    outcomes = over_nodes.end(begun, ranks=0)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].tail()
    assert corrupt_ones(outcomes) == [[], []]
    for outcome in outcomes:
        assert "bit-identical to an uninterrupted run: yes" not in outcome.output
        assert "all replicas equal" not in outcome.output
        assert "ranks that should hold the same differ at the gate of step 6" in outcome.output, outcome.tail()
    why = r"uninterrupted run: no \(seen at step 6: ranks that should hold the same differ"
    assert re.search(why, outcomes[0].output), outcomes[0].tail()


@pytest.mark.slow
def test_a_corrupt_rank_where_a_spare_node_waits(folder: Path, stock: Stock) -> None:
    """The nodes exchange slots before each proof of a gate, also of the one that stays shut."""
    begun = over_nodes.begin(folder, STEPS, [fault("bitflip", 0, "forward", 6)], options=OFTEN, spares=[2])
    outcomes = over_nodes.end(begun)
    all_exact(outcomes[:2], stock(*STEPS), struck=[0])
    assert corrupt_ones(outcomes) == [[0], [], []] and outcomes[2].code == 0, outcomes[2].tail()


@pytest.mark.slow
def test_rarer_comparisons_promise_less_on_every_node(folder: Path) -> None:
    faults = [fault("bitflip", 3, "forward", 5), kill(0, "backward", 10)]
    begun = over_nodes.begin(folder, STEPS, faults, options=("--check-every", "4"))
    outcomes = over_nodes.end(begun)
    assert corrupt_ones(outcomes) == [[], [3]]
    for outcome in outcomes:  # only node 1 knows where it was seen
        why = r"uninterrupted run: no \((seen at step 8: )?a rank's weights were corrupt"
        assert re.search(why, outcome.output), outcome.tail()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("phase", ["forward", "backward", "gate", "update", "idle"])
def test_a_rank_dies_anywhere(phase: str, rank: int, folder: Path, stock: Stock) -> None:
    steps = (*STEPS, "--accum", "across", "--data", "loader")
    begun = over_nodes.begin(folder, steps, [kill(rank, phase, 5)])
    all_exact(over_nodes.end(begun), stock(*steps), struck=[rank // 2])


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "phase"), [(0, "backward"), (3, "gate"), (1, "update"), (2, "update")])
def test_replicas_of_a_shard_on_another_node(rank: int, phase: str, folder: Path, sharded_stock: Stock) -> None:
    told = ("--steps", "8", *sharding.HSDP)
    begun = over_nodes.begin(folder, told, [kill(rank, phase, 4)], script=sharding.SCRIPT)
    outcomes = over_nodes.end(begun, timeout=sharding.SLOW)
    all_exact(outcomes, sharded_stock(*told), struck=[rank // 2])
    if phase == "update":
        assert "state copied from another node" in outcomes[rank // 2].output


@pytest.mark.slow
def test_fully_sharded_over_nodes(folder: Path, sharded_stock: Stock) -> None:
    told = ("--steps", "8", "--layout", "fsdp")
    begun = over_nodes.begin(folder, told, [kill(2, "backward", 3), kill(1, "gate", 5)], script=sharding.SCRIPT)
    all_exact(over_nodes.end(begun, timeout=sharding.SLOW), sharded_stock(*told), struck=[0, 1])


@pytest.mark.slow
def test_a_shard_that_nobody_has_any_more_is_worth_another_try_on_every_node(folder: Path) -> None:
    begun = over_nodes.begin(folder, ("--steps", "8", "--layout", "fsdp"), [kill(1, "update", 4)], script=sharding.SCRIPT)
    outcomes = over_nodes.end(begun, ranks=0, timeout=sharding.SLOW)
    assert [outcome.code for outcome in outcomes] == [75, 75], outcomes[0].tail()
    assert "its shard of " in outcomes[1].output and "take host snapshots (--snapshot-every)" in outcomes[1].output, outcomes[1].tail()


def rolled_back(outcomes: list[Outcome]) -> list[list[int]]:
    """The steps to which each node's ranks went back to a host snapshot."""
    return [[publish["resume"] for publish in one.actions("Publish") if publish["rollback"]] for one in outcomes]


def test_a_shard_that_nobody_has_any_more_sends_all_nodes_back_to_the_host_snapshot(folder: Path, sharded_stock: Stock) -> None:
    told = ("--steps", "8", "--layout", "fsdp")
    begun = over_nodes.begin(folder, told, [kill(1, "update", 5)], nodes=(1, 1), script=sharding.SCRIPT, options=EVERY_2)
    outcomes = over_nodes.end(begun, ranks=2, timeout=sharding.SLOW)
    all_exact(outcomes, sharded_stock(*told, ranks=2), struck=[1])
    assert rolled_back(outcomes) == [[4], [4]], outcomes[1].tail()
    assert "2 steps done again from the host snapshot of step 4" in outcomes[1].output


@pytest.mark.slow
@pytest.mark.parametrize(
    "strikes",
    [
        [kill(2, "update", 5)],
        [kill(1, "update", 5), kill(2, "update", 5)],
        [kill(1, "update", 5), kill(2, "update", 7), kill(1, "update", 7)],
        [kill(1, "update", 5), kill(2, "reset", 3)],
        [kill(1, "update", 5), kill(0, "restore", 3), kill(3, "restore", 3)],
        [kill(1, "update", 5), kill(1, "restore", 4)],
    ],
    ids=["one", "two at once", "twice", "another node's in the rollback", "both nodes' at its end", "a replacement"],
)
def test_going_back_together(strikes: list[str], folder: Path, sharded_stock: Stock) -> None:
    """Deaths in the rollback: whoever had gone back goes back again."""
    told = ("--steps", "8", "--layout", "fsdp")
    begun = over_nodes.begin(folder, told, strikes, script=sharding.SCRIPT, options=EVERY_2)
    outcomes = over_nodes.end(begun, timeout=sharding.SLOW)
    all_exact(outcomes, sharded_stock(*told))
    assert sum(len(one.notes("fault")) for one in outcomes) == len(strikes), outcomes[0].tail()
    assert all(back and set(back) <= {4, 6} for back in rolled_back(outcomes)), rolled_back(outcomes)


@pytest.mark.slow
def test_snapshots_of_each_step_on_nodes_whose_replacements_missed_some(folder: Path, sharded_stock: Stock) -> None:
    """A death in nearly every step: the nodes always have a step in common."""
    told = ("--steps", "8", "--layout", "fsdp")
    strikes = [kill(2, "update", 2), kill(1, "idle", 3), kill(1, "update", 4), kill(3, "gate", 5), kill(2, "update", 6)]
    begun = over_nodes.begin(folder, told, strikes, script=sharding.SCRIPT, options=("--snapshot-every", "1"))
    outcomes = over_nodes.end(begun, timeout=sharding.SLOW)
    all_exact(outcomes, sharded_stock(*told))
    assert all({2, 4, 6} <= {*back} for back in rolled_back(outcomes)), rolled_back(outcomes)


@pytest.mark.slow
def test_every_replica_dies_in_its_update_on_every_node(folder: Path, stock: Stock) -> None:
    """Each node has the whole state among its own ranks."""
    begun = over_nodes.begin(folder, STEPS, [kill(rank, "update", 7) for rank in range(4)], options=EVERY_2)
    outcomes = over_nodes.end(begun)
    all_exact(outcomes, stock(*STEPS), struck=[0, 1])
    assert all(back and set(back) == {6} for back in rolled_back(outcomes)), rolled_back(outcomes)


@pytest.mark.slow
def test_nodes_with_different_options_do_not_begin(folder: Path) -> None:
    """Who sees the other one ends; if that is one of them, the other one goes on waiting for a node."""
    begun = over_nodes.begin(folder, ("--steps", "8"), nodes=(1, 1), options=("--snapshot-every", "{node}"))
    wait_for(lambda: any(one.process.poll() is not None for one in begun), "the end of a node")
    for one in begun:
        one.process.terminate()
    codes = [one.wait(60.0) for one in begun]
    assert 2 in codes
    said = next(one.output for one, code in zip(begun, codes, strict=True) if code == 2)
    assert "was started with --snapshot-every" in said and "use the same on every node" in said, said


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("nodes", [(2, 2), (2, 1, 1), (1, 3)], ids=str)
def test_ranks_die_at_random(nodes: tuple[int, ...], seed: int, folder: Path, stock: Stock) -> None:
    """One rank, or ranks of two nodes at once; the next ones often die in the repair."""
    steps = ("--steps", "80", "--stretch", "0.005")
    begun = over_nodes.begin(folder, steps, nodes=nodes)
    killer = over_nodes.Killer(begun, seed)
    killer.wait_for_all(4)
    killed = 0
    while killed < 5 and all(one.process.poll() is None for one in begun):
        killer.pause(0.05, 1.0)
        killed += killer.kill(nodes=2 if killed == 2 else 1)
    outcomes = over_nodes.end(begun)
    all_exact(outcomes, stock(*steps))
    assert killed >= 3


@pytest.mark.slow
@pytest.mark.slow
def test_random_faults(folder: Path, stock: Stock) -> None:
    steps = ("--steps", "60")
    outcomes = over_nodes.end(over_nodes.begin(folder, steps, options=("--random-faults", "0.1", "--fault-seed", "3")))
    all_exact(outcomes, stock(*steps))
    struck = [note["fired"]["rank"] for outcome in outcomes for note in outcome.notes("fault")]
    assert {rank // 2 for rank in struck} == {0, 1}, struck


def test_what_only_another_node_knows_makes_the_result_not_known(folder: Path) -> None:
    """The survivor drew behind the body in which rank 1 died, its replacement does not, and nobody on node 1 could tell."""
    script = harness.SCRIPTS / "draws_behind.py"
    begun = over_nodes.begin(folder, STEPS, [kill(1, "update", 6)], nodes=(1, 1), script=script)
    outcomes = over_nodes.end(begun, ranks=0)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[1].tail()
    assert "bit-identical to an uninterrupted run: not known" in outcomes[1].output, outcomes[1].tail()
    assert "all replicas equal" not in outcomes[0].output, outcomes[0].tail()


@pytest.mark.slow
def test_after_a_loss_the_others_wait_and_can_be_interrupted(folder: Path) -> None:
    """Nobody has a lost node's ranks, and no spare node waits: the others wait for one, to start from the beginning."""
    steps = ("--steps", "400", "--stretch", "0.01")
    meet = ("--max-restarts", "2", "--rdzv-conf", "keep_alive=2")
    begun = over_nodes.begin(folder, steps, options=meet)
    over_nodes.Killer(begun, 0).wait_for_all(4)
    begun[1].process.send_signal(signal.SIGKILL)
    wait_for(lambda: "node 1 (" in begun[0].output and "is gone" in begun[0].output, "the loss of node 1")
    begun[0].process.send_signal(signal.SIGINT)
    assert begun[0].wait(30.0) == 130
    begun[1].wait(30.0)


@pytest.mark.slow
@lans.needs_lan
@pytest.mark.parametrize("backend", ["file", "c10d"])
def test_over_a_network_of_their_own(backend: str, folder: Path, stock: Stock) -> None:
    """Each node has an address that the others reach through a bridge, and a loopback interface that they do not."""
    steps = ("--steps", "60", "--stretch", "0.01")
    with lans.lan(2) as lan:
        meet = () if backend == "file" else lan.meeting()
        begun = over_nodes.begin(folder, steps, lan=lan, backend=meet)
        killer = over_nodes.Killer(begun, 7)
        killer.wait_for_all(4)
        killer.kill_now_and_then(3)
        all_exact(over_nodes.end(begun), stock(*steps))


@pytest.mark.slow
@needs_etcd
def test_nodes_that_meet_in_an_etcd(folder: Path, stock: Stock) -> None:
    (folder / "etcd").mkdir()
    engine = RealEtcd(folder / "etcd")
    try:
        meet = ("--rdzv-backend", "etcd", "--rdzv-endpoint", engine.endpoint)
        begun = over_nodes.begin(folder, STEPS, [kill(2, "backward", 6), kill(1, "update", 8)], backend=meet)
        all_exact(over_nodes.end(begun), stock(*STEPS), struck=[0, 1])
    finally:
        engine.close()


@pytest.mark.slow
@needs_fuse
def test_a_rank_dies_while_the_shared_folder_is_slow_and_stale(folder: Path, stock: Stock) -> None:
    steps = ("--steps", "60", "--stretch", "0.05")
    share = Share(folder / "share", stale=1.0)
    try:
        endpoint = str(share.mounts[0]).replace("mount0", "mount{node}")
        meet = ("--rdzv-backend", "file", "--rdzv-endpoint", endpoint, "--rdzv-conf", "keep_alive=30")
        begun = over_nodes.begin(folder, steps, backend=meet)
        killer = over_nodes.Killer(begun, 7)
        killer.wait_for_all(4)
        share.trouble(delay=0.1)
        for node in range(2):
            os.kill(killer.pids(node)[0], signal.SIGKILL)
            wait_for(lambda at=node: "recovered in" in begun[at].output, "the repair", 60.0)  # type: ignore[misc]
        share.trouble()
        all_exact(over_nodes.end(begun), stock(*steps), struck=[0, 1])
    finally:
        share.close()


@pytest.mark.slow
def test_nodes_that_meet_in_kubernetes(folder: Path, stock: Stock) -> None:
    api = OwnKubernetes()
    try:
        meet = ("--rdzv-backend", "kubernetes", "--rdzv-endpoint", api.endpoint, "--rdzv-conf", f"namespace={NAMESPACE}")
        begun = over_nodes.begin(folder, STEPS, [kill(2, "backward", 6), kill(1, "update", 8)], backend=meet)
        all_exact(over_nodes.end(begun), stock(*STEPS), struck=[0, 1])
    finally:
        api.close()


@pytest.mark.slow
def test_nodes_with_given_ranks(folder: Path, stock: Stock) -> None:
    begun = over_nodes.begin(folder, STEPS, [kill(2, "backward", 6), kill(1, "update", 8)], backend=given_ranks())
    all_exact(over_nodes.end(begun), stock(*STEPS), struck=[0, 1])


@pytest.mark.slow
@lans.needs_lan
def test_a_copy_over_a_network(folder: Path, sharded_stock: Stock) -> None:
    told = ("--steps", "8", *sharding.HSDP)
    with lans.lan(2) as lan:
        begun = over_nodes.begin(folder, told, [kill(3, "update", 4)], script=sharding.SCRIPT, lan=lan)
        outcomes = over_nodes.end(begun, timeout=sharding.SLOW)
        all_exact(outcomes, sharded_stock(*told), struck=[1])
        assert "state copied from another node" in outcomes[1].output


@pytest.mark.slow
@lans.needs_lan
def test_a_cable_that_is_out_for_a_while(folder: Path, stock: Stock) -> None:
    """Nothing fails: the training waits, and goes on."""
    steps = ("--steps", "60", "--stretch", "0.01")
    with lans.lan(2) as lan:
        begun = over_nodes.begin(folder, steps, lan=lan)
        killer = over_nodes.Killer(begun, 7)
        killer.wait_for_all(4)
        lan.plug(1, into=False)
        killer.pause(1.5, 1.5)
        lan.plug(1, into=True)
        outcomes = over_nodes.end(begun)
        all_exact(outcomes, stock(*steps))
        assert not any(outcome.notes("incident") for outcome in outcomes)


@pytest.mark.slow
@lans.needs_lan
@pytest.mark.parametrize("backend", ["file", "c10d"])
def test_a_network_that_loses_packets(backend: str, folder: Path, stock: Stock, tmp_path: Path) -> None:
    """One of twenty, each way; a datagram of a bell, too."""
    steps = ("--steps", "60", "--stretch", "0.01")
    with lans.lan(2, tmp_path / "rules") as lan:
        for node in range(2):
            lan.lose(node, 0.05, 0.0)
        meet = () if backend == "file" else lan.meeting()
        begun = over_nodes.begin(folder, steps, lan=lan, backend=meet)
        killer = over_nodes.Killer(begun, 11)
        killer.wait_for_all(4)
        killer.kill_now_and_then(3)
        all_exact(over_nodes.end(begun), stock(*steps))


@pytest.mark.slow
@lans.needs_lan
@pytest.mark.parametrize("way", ["to", "from"])
def test_a_cable_that_is_bad_one_way_for_a_while(way: str, folder: Path, stock: Stock, tmp_path: Path) -> None:
    steps = ("--steps", "60", "--stretch", "0.01")
    with lans.lan(2, tmp_path / "rules") as lan:
        begun = over_nodes.begin(folder, steps, lan=lan)
        killer = over_nodes.Killer(begun, 7)
        killer.wait_for_all(4)
        lan.lose(1, float(way == "to"), float(way == "from"))
        killer.pause(1.5, 1.5)
        lan.lose(1, 0.0, 0.0)
        all_exact(over_nodes.end(begun), stock(*steps))
