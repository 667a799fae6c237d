"""A node is lost: a spare node takes its place, and the run ends where an uninterrupted one ends."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from ftrun.core.system.procfs import process_start
from tests.conftest import wait_for
from tests.e2e import harness, over_nodes, sharding
from tests.e2e import lan as lans
from tests.e2e.harness import Outcome, Running, fault, kill
from tests.e2e.over_nodes import all_exact
from tests.e2e.test_over_nodes import Stock, rolled_back

STEPS = ("--steps", "60", "--stretch", "0.05")
SOON = ("--rdzv-conf", "keep_alive=2")
LATE = 30  # a step that comes after the spare node


def lose(rank: int, at: str, step: int = LATE) -> str:
    return fault("node-kill", rank, at, step)


def begin(
    folder: Path,
    arguments: Sequence[str],
    faults: Sequence[str] = (),
    options: Sequence[str] = (),
    spares: Sequence[int] = (2,),
    **more: object,
) -> list[Running]:
    """Start a run with a spare node of two ranks, or with others, and wait until they wait."""
    begun = over_nodes.begin(folder, arguments, faults, options=(*SOON, *options), spares=spares, **more)  # type: ignore[arg-type]
    wait_for(lambda: all("this node is a spare" in one.output for one in begun[-len(spares) :]), "a spare node")
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
def test_a_node_is_lost_after_all_went_back_to_a_host_snapshot(folder: Path, stock: Stock) -> None:
    """The mirrors of its slots went back with them, and the spare node's ranks take snapshots like the others."""
    strikes = [*(kill(rank, "update", 7) for rank in range(4)), lose(2, "backward"), *(kill(rank, "update", 50) for rank in (0, 1))]
    begun = begin(folder, STEPS, strikes, options=("--snapshot-every", "2"))
    outcomes = end(begun, 1)
    all_exact(outcomes, stock(*STEPS), struck=[1])
    assert "from the host snapshot of step 6" in outcomes[0].output, outcomes[0].tail()


FSDP = ("--steps", "40", "--layout", "fsdp")
EVERY_4 = ("--snapshot-every", "4")


def lost_shards(
    folder: Path, strikes: Sequence[str], lost: Sequence[int], options: Sequence[str] = EVERY_4, told: Sequence[str] = FSDP, **more: object
) -> list[Outcome]:
    """Lose nodes of a model whose shards nobody else has, at its strikes; return the outcomes of the others."""
    begun = begin(folder, told, strikes, options, script=sharding.SCRIPT, **more)
    for node in lost:
        begun[node].wait(120.0)
    return over_nodes.end([one for node, one in enumerate(begun) if node not in lost], timeout=sharding.SLOW)


def went_back(outcomes: list[Outcome]) -> list[int]:
    """The steps to which all went back."""
    steps = {step for each in rolled_back(outcomes) for step in each}
    assert steps, outcomes[0].tail()
    return sorted(steps)


def test_shards_of_a_lost_node_come_from_the_copies_of_its_host_snapshots(folder: Path, sharded_stock: Stock) -> None:
    outcomes = lost_shards(folder, [lose(2, "backward")], [1])
    all_exact(outcomes, sharded_stock(*FSDP), struck=[1])
    (back,) = went_back(outcomes)
    assert back in (24, 28), outcomes[0].tail()
    assert f"from the host snapshot of step {back}" in outcomes[1].output, outcomes[1].tail()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options", "warned"),
    [(("--layout", "fsdp"), (), True), (("--layout", "fsdp"), EVERY_4, False), (sharding.HSDP, (), False)],
)
def test_shards_that_only_one_node_has_are_told_of(layout: tuple[str, ...], options: tuple[str, ...], warned: bool, folder: Path) -> None:
    outcomes = over_nodes.end(begin(folder, ("--steps", "60", *layout), (), options, script=sharding.SCRIPT), timeout=sharding.SLOW)
    assert [outcome.code for outcome in outcomes] == [0, 0, 0]
    told = ["every copy of this rank's part of the model is on node 0" in outcome.output for outcome in outcomes]
    assert told == [warned, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("every", ["1", "7"])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("phase", ["forward", "gate", "update", "idle"])
def test_shards_of_a_node_that_is_lost_anywhere(phase: str, rank: int, every: str, folder: Path, sharded_stock: Stock) -> None:
    """Copies are always being made with a snapshot in each step."""
    outcomes = lost_shards(folder, [lose(rank, phase)], [rank // 2], ("--snapshot-every", every))
    all_exact(outcomes, sharded_stock(*FSDP), struck=[1])
    assert all(LATE - 14 <= back <= LATE + 1 for back in went_back(outcomes)), outcomes[0].tail()


@pytest.mark.slow
def test_nodes_are_lost_one_after_the_other(folder: Path, sharded_stock: Stock) -> None:
    """The spare node in the place of the first one has copied the snapshots of the second one."""
    told = ("--steps", "80", "--layout", "fsdp")
    outcomes = lost_shards(folder, [lose(2, "backward"), lose(0, "update", 70)], [0, 1], told=told, spares=[2, 2])
    all_exact(outcomes, sharded_stock(*told), struck=[0, 1])
    first, second = went_back(outcomes)
    assert first in (24, 28) and second in (60, 64, 68), outcomes[0].tail()


@pytest.mark.slow
def test_a_rank_dies_in_its_update_after_a_node_was_lost(folder: Path, sharded_stock: Stock) -> None:
    """The ranks of the spare node go on in the snapshots that they brought."""
    told = ("--steps", "60", "--layout", "fsdp")
    outcomes = lost_shards(folder, [lose(2, "backward"), kill(1, "update", 50)], [1], told=told)
    all_exact(outcomes, sharded_stock(*told), struck=[0, 1])
    assert went_back(outcomes)[-1] in (44, 48), outcomes[0].tail()


@pytest.mark.slow
@pytest.mark.parametrize("at", ["reset", "restore"])
def test_another_node_is_lost_while_all_go_back(at: str, folder: Path, sharded_stock: Stock) -> None:
    """Of four nodes the second and the last: no one of them copied the other's snapshots."""
    strikes = [lose(1, "backward"), lose(3, at)]
    outcomes = lost_shards(folder, strikes, [1, 3], nodes=(1, 1, 1, 1), spares=[1, 1])
    all_exact(outcomes, sharded_stock(*FSDP), struck=[2, 3])
    assert set(went_back(outcomes)) <= {24, 28}, outcomes[0].tail()


@pytest.mark.slow
@lans.needs_lan
def test_shards_of_a_machine_that_is_lost(folder: Path, sharded_stock: Stock) -> None:
    """Nobody hears of its end, also not who was reading from it."""
    told = ("--steps", "400", "--layout", "fsdp")
    with lans.lan(3) as lan:
        begun = begin(folder, told, (), ("--snapshot-every", "1"), script=sharding.SCRIPT, lan=lan)
        over_nodes.until_gate(begun[:2], 20)
        lan.destroy(1)
        outcomes = end(begun, 1)
        all_exact(outcomes, sharded_stock(*told), struck=[1])
        went_back(outcomes)


@pytest.mark.slow
@lans.needs_lan
def test_a_node_whose_host_snapshots_have_no_copies_yet(folder: Path, sharded_stock: Stock) -> None:
    """Those that there were died with an fd store, and the node's own one gives nothing for others: all start from the beginning."""
    told = ("--steps", "100", "--layout", "fsdp")

    def fd_stores(node: int) -> list[int]:
        lines = (begun[node].run_dir() / "journal.jsonl").read_text().split("\n")[:-1]
        return [note["pid"] for note in map(json.loads, lines) if note.get("note") == "service" and note["service"] == "fd store"]

    with lans.lan(3) as lan:
        begun = begin(folder, told, (), EVERY_4, script=sharding.SCRIPT, lan=lan)
        over_nodes.until_gate(begun[:2], 10)
        os.kill(fd_stores(1)[-1], signal.SIGSTOP)
        os.kill(fd_stores(0)[-1], signal.SIGKILL)
        wait_for(lambda: len(fd_stores(0)) == 2, "another fd store")
        over_nodes.until_gate(begun[:2], 20)
        lan.destroy(1)
        outcomes = end(begun, 1)
    for outcome in outcomes:
        harness.same(sharded_stock(*told), outcome)
        assert outcome.code == 0, outcome.tail()
    assert not any(rolled_back(outcomes)), outcomes[0].tail()
    assert "no copy on another node (the node that copies it has no copy)" in outcomes[1].output, outcomes[1].tail()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("phase", ["forward", "gate", "update", "idle"])
def test_a_node_is_lost_anywhere(phase: str, rank: int, folder: Path, stock: Stock) -> None:
    """Node 0 leads, and has the store in which the ranks meet."""
    steps = (*STEPS, "--accum", "across", "--data", "loader")
    all_exact(end(begin(folder, steps, [lose(rank, phase)]), rank // 2), stock(*steps), struck=[1])


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_only_the_launcher_dies(lost: int, folder: Path, stock: Stock) -> None:
    """The node's guardian ends its workers and says so: nobody waits until its record has stood still, which would take an hour here."""
    begun = over_nodes.begin(folder, STEPS, options=("--rdzv-conf", "keep_alive=3600,beat=0.5"), spares=[2])
    wait_for(lambda: "this node is a spare" in begun[2].output, "a spare node")
    over_nodes.until_gate(begun[:2], 3)
    begun[lost].process.send_signal(signal.SIGKILL)
    all_exact(end(begun, lost), stock(*STEPS), struck=[1])


@pytest.mark.slow
def test_a_rank_dies_beside_the_node(folder: Path, stock: Stock) -> None:
    begun = begin(folder, STEPS, [lose(2, "backward"), kill(1, "backward", LATE)])
    all_exact(end(begun, 1), stock(*STEPS), struck=[0, 1])


@pytest.mark.slow
def test_the_next_rank_dies_on_the_spare_node(folder: Path, stock: Stock) -> None:
    """A node that took a place is a node like the others: its memory serves, and it is mirrored."""
    begun = begin(folder, ("--steps", "80", "--stretch", "0.05"), [lose(2, "update"), kill(0, "update", 65)])
    all_exact(end(begun, 1), stock("--steps", "80", "--stretch", "0.05"), struck=[0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_shards_whose_replicas_are_on_the_other_node(rank: int, folder: Path, sharded_stock: Stock) -> None:
    told = ("--steps", "60", *sharding.HSDP)
    begun = begin(folder, told, [lose(rank, "backward")], script=sharding.SCRIPT)
    lost = rank // 2
    begun[lost].wait(120.0)
    outcomes = over_nodes.end([one for node, one in enumerate(begun) if node != lost], timeout=sharding.SLOW)
    all_exact(outcomes, sharded_stock(*told), struck=[1])


@pytest.mark.slow
def test_one_of_three_nodes(folder: Path, stock: Stock) -> None:
    begun = over_nodes.begin(folder, STEPS, [lose(2, "gate")], nodes=(2, 1, 1), options=SOON, spares=[1])
    wait_for(lambda: "this node is a spare" in begun[3].output, "a spare node")
    all_exact(end(begun, 1), stock(*STEPS), struck=[2])


@pytest.mark.slow
@pytest.mark.timeout(300)  # two losses, each missed after some seconds, and a long run of stock torch beside
def test_a_launcher_that_was_frozen_comes_back_as_a_spare_node(folder: Path, stock: Stock) -> None:
    steps = ("--steps", "200", "--stretch", "0.05")
    begun = begin(folder, steps)
    over_nodes.until_gate(begun[:2], 3)
    begun[1].process.send_signal(signal.SIGSTOP)
    workers = over_nodes.Killer(begun[:2], 0).pids(1)
    wait_for(lambda: "takes its place" in begun[0].output, "the loss")
    assert len(workers) == 2 and not any(map(process_start, workers)), "they end before others take their places"
    wait_for(lambda: "recovered in" in begun[2].output, "the repair")
    begun[1].process.send_signal(signal.SIGCONT)
    wait_for(lambda: begun[1].output.count("this node is a spare") == 1, "its return", 60.0)
    assert "its workers were ended before that" in begun[1].output, begun[1].output
    begun[2].process.send_signal(signal.SIGKILL)
    wait_for(lambda: "recovered in" in begun[1].output, "the second repair", 60.0)
    all_exact(end(begun, 2), stock(*steps), struck=[1])


@pytest.mark.slow
def test_ranks_that_ended_with_their_lease_are_no_replacements(folder: Path, stock: Stock) -> None:
    """Their launcher comes back before the others miss it. They did not fail: --max-replacements is about those that do."""
    steps = ("--steps", "100", "--stretch", "0.05")
    begun = over_nodes.begin(folder, steps, options=("--rdzv-conf", "keep_alive=8", "--max-replacements", "0"))
    over_nodes.until_gate(begun, 3)
    begun[1].process.send_signal(signal.SIGSTOP)
    workers = over_nodes.Killer(begun, 0).pids(1)
    wait_for(lambda: not any(map(process_start, workers)), "the end of its ranks")
    begun[1].process.send_signal(signal.SIGCONT)
    outcomes = over_nodes.end(begun)
    all_exact(outcomes, stock(*steps), struck=[1])
    victims = [one["fault"] for note in outcomes[1].notes("incident") for one in note["victims"]]
    assert len(workers) == 2 and victims == ["cut-off"] * 2, outcomes[1].tail()


@pytest.mark.slow
def test_a_spare_node_that_nobody_needs(folder: Path, stock: Stock) -> None:
    steps = ("--steps", "60", "--stretch", "0.02")
    outcomes = over_nodes.end(begin(folder, steps))
    all_exact(outcomes[:2], stock(*steps))
    assert outcomes[2].code == 0 and "ftrun: done in" in outcomes[2].output, outcomes[2].tail()


@pytest.mark.slow
@pytest.mark.parametrize("why", ["turned off", "spent"])
def test_a_spare_node_in_a_restart(why: str, folder: Path, stock: Stock) -> None:
    """All start from the beginning, and the spare node takes part."""
    options = ("--node-loss", "restart") if why == "turned off" else ("--max-node-replacements", "0")
    begun = begin(folder, STEPS, [lose(2, "backward")], options)
    outcomes = end(begun, 1)
    for outcome in outcomes:
        harness.same(stock(*STEPS), outcome)
        assert outcome.code == 0 and "after: node 1 (" in outcome.output, outcome.tail()


@pytest.mark.slow
@pytest.mark.parametrize("why", ["the mirror is lost, too", "no gate has opened"])
def test_a_node_that_nobody_can_replace(why: str, folder: Path, stock: Stock) -> None:
    """All start from the beginning, and that costs no restart of --max-restarts, which is 0."""
    first = why == "no gate has opened"
    faults = [lose(1, "backward", 0)] if first else [lose(1, "backward"), lose(2, "backward")]
    begun = over_nodes.begin(folder, STEPS, faults, nodes=(1, 1, 1, 1), options=SOON, spares=[1] if first else [1, 1])
    for node in (1,) if first else (1, 2):
        begun[node].wait(60.0)
    outcomes = over_nodes.end([begun[0], *begun[2 if first else 3 :]])
    for outcome in outcomes:
        harness.same(stock(*STEPS), outcome)
    assert "nobody has this rank's slots" in outcomes[0].output, outcomes[0].tail()


@pytest.mark.slow
@lans.needs_lan
def test_a_node_whose_cable_is_cut(folder: Path, stock: Stock) -> None:
    """It ends by itself, since it cannot reach the others any more; nothing on it dies before."""
    with lans.lan(3) as lan:
        meet = lan.meeting()
        begun = begin(folder, ("--steps", "100", "--stretch", "0.05"), lan=lan, backend=meet)
        over_nodes.until_gate(begun[:2], 3)
        lan.plug(1, into=False)
        outcomes = end(begun, 1)
        assert begun[1].process.returncode == 1 and "cannot be reached" in begun[1].output, begun[1].output
        all_exact(outcomes, stock("--steps", "100", "--stretch", "0.05"), struck=[1])


@pytest.mark.slow
@lans.needs_lan
@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_is_lost(lost: int, folder: Path, stock: Stock) -> None:
    """Nobody says anything: neither its guardian nor its kernel, which would close connections."""
    steps = ("--steps", "100", "--stretch", "0.05")
    with lans.lan(3) as lan:
        begun = begin(folder, steps, lan=lan)
        over_nodes.until_gate(begun[:2], 3)
        lan.destroy(lost)
        all_exact(end(begun, lost), stock(*steps), struck=[1])


@pytest.mark.slow
def test_a_node_on_which_too_much_fails_gives_its_place_to_a_spare_one(folder: Path, stock: Stock) -> None:
    """--max-replacements is what one machine may come to, not the run: that goes on elsewhere."""
    faults = [kill(2, "backward", 20), kill(2, "update", LATE)]
    begun = begin(folder, STEPS, faults, ("--max-replacements", "1"))
    assert begun[1].wait(60.0) == 75, begun[1].output
    assert "this node's place goes to a spare node as soon as its workers have ended" in begun[1].output
    all_exact(end(begun, 1), stock(*STEPS), struck=[1])
    assert "where --max-replacements is 1, and " in begun[0].output and "takes its place" in begun[0].output, begun[0].output


@pytest.mark.slow
def test_without_a_spare_node_such_a_node_ends_the_run(folder: Path) -> None:
    faults = [kill(2, "backward", 20), kill(2, "update", LATE)]
    begun = over_nodes.begin(folder, STEPS, faults, options=(*SOON, "--max-replacements", "1"))
    outcomes = over_nodes.end(begun, ranks=0)
    assert [outcome.code for outcome in outcomes] == [75, 75], outcomes[0].tail()


@pytest.mark.slow
@lans.needs_lan
@pytest.mark.parametrize("way", ["to", "from"])
def test_a_cable_that_is_cut_one_way(way: str, folder: Path, stock: Stock, tmp_path: Path) -> None:
    """The node meets the others in an endpoint of another node: it hears them, or they hear it, and not both. It ends by itself."""
    steps = ("--steps", "100", "--stretch", "0.05")
    with lans.lan(3, tmp_path / "rules") as lan:
        meet = lan.meeting()
        begun = begin(folder, steps, lan=lan, backend=meet)
        over_nodes.until_gate(begun[:2], 3)
        lan.lose(1, float(way == "to"), float(way == "from"))
        outcomes = end(begun, 1)
        assert begun[1].process.returncode == 1 and "cannot be reached" in begun[1].output, begun[1].output
        all_exact(outcomes, stock(*steps), struck=[1])


@pytest.mark.slow
@pytest.mark.parametrize("at", ["stop", "reset", "restore"])
def test_the_leader_is_lost_in_a_repair(at: str, folder: Path, stock: Stock) -> None:
    """Before it has answered, before it has decided, and before it lets all go on."""
    begun = begin(folder, STEPS, [kill(3, "backward", LATE), lose(0, at)])
    all_exact(end(begun, 0), stock(*STEPS), struck=[0, 1])
