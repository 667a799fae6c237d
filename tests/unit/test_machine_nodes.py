"""The controller of one node among several in a repair in place: it stops, tells, waits for the decision, and opens with the others."""

from __future__ import annotations

import pytest

from ftrun.control import events as ev
from ftrun.control.machine import RunPhase
from ftrun.control.states import NOWHERE
from tests.unit.driver import Driver, kinds, only, says


def node(nproc: int = 2, **options: object) -> Driver:
    return Driver(nproc, 1, shared=True, **options).up()


def stopped_by_another(run: Driver) -> tuple[ev.Action, ...]:
    """Another node stops the world, and both ranks of this one stop; the last answer."""
    run.send(ev.WorldStops(0.0, "rank 5 on node 2 failed"))
    run.close(4)
    return run.answer("stopped")


def told(generation: int, last: int, replaced: tuple[int, ...] = (), cells: tuple[int, ...] = (0, 1)) -> ev.TellStopped:
    """What a node tells; `cells`: whose host snapshots are those of its ranks."""
    return ev.TellStopped(generation, last, replaced, cells)


def test_the_node_of_a_dead_rank_tells_when_the_others_of_it_have_stopped() -> None:
    run = node()
    assert "CloseGate" in kinds(run.kill(run.holder(0)))
    assert run.close(4) == (), "rank 1 may still be in its update"
    assert run.answer("stopped", (1,)) == (told(2, 4, (0,)),)
    assert run.at(RunPhase.STOPPING), "where to go on is not this node's decision"
    assert run.close(4) == () and run.answer("stopped", (1,)) == (), "it tells once"


def test_a_rank_that_is_about_to_end_is_waited_for() -> None:
    run = node()
    worker = run.holder(0)
    run.send(ev.Dying(0.0, worker))
    run.close(4)
    assert run.answer("stopped", (1,)) == ()
    assert told(2, 4, (0,)) in run.kill(worker)


def test_all_go_on_where_the_furthest_node_was() -> None:
    run = node()
    run.kill(run.holder(0))
    run.close(4)
    run.answer("stopped", (1,))
    orders = run.send(ev.WorldDecided(0.0, 2, 6))
    assert kinds(orders)[:2] == ["DecideGate", "Publish"], "ranks that wait at gate 5 pass before they look for the new world"
    assert orders[0] == ev.DecideGate(2, 6)
    assert only(orders, ev.Publish).resume == 6 and only(orders, ev.Publish).replaced == (0,)


def test_the_gate_opens_with_those_of_the_other_nodes() -> None:
    run = node()
    run.kill(run.holder(0))
    run.close(4)
    run.answer("stopped", (1,))
    run.send(ev.WorldDecided(0.0, 2, 5))
    for stage in ("stopped", "cleaned", "ready", "reset"):
        assert run.answer(stage) == ()
    assert run.answer("restored") == (ev.TellRestored(2),)
    assert run.answer("resumed") == () and run.at(RunPhase.REPAIRING), "another node may still have to stop everyone again"
    assert ev.OpenGate(2) in run.send(ev.WorldRestored(0.0, 2))
    assert run.at(RunPhase.RUNNING)
    assert "recovered" in says(run.answer("first_done"))


def test_a_node_stops_with_another_one() -> None:
    run = node()
    orders = run.send(ev.WorldStops(0.0, "rank 5 on node 2 failed"))
    assert says(orders) == ["peer_stops"] and ev.CloseGate(2) in orders
    run.close(4)
    assert run.answer("stopped") == (told(2, 4),)
    assert only(run.send(ev.WorldDecided(0.0, 2, 5)), ev.Publish).replaced == ()


def test_a_spare_node_takes_a_place() -> None:
    """All of its ranks are replaced, by workers that have yet to start; nothing of them is here."""
    run = Driver(2, 1, shared=True)
    orders = run.send(ev.Seated(0.0, 3))
    assert kinds(orders) == ["Say", "ResetGate", "CloseGate", "Deadline"]
    assert run.close(-1) == (told(1, -1, (0, 1), (NOWHERE, NOWHERE)),), "nobody here moves"
    orders = run.send(ev.WorldDecided(0.0, 1, 5))
    publish = only(orders, ev.Publish)
    assert (publish.resume, publish.replaced, publish.lost) == (5, (0, 1), (NOWHERE, NOWHERE)) and not publish.fresh
    assert kinds(orders).count("Spawn") == 2
    for stage in ("ready", "reset"):
        assert run.answer(stage) == ()
    assert run.answer("restored") == (ev.TellRestored(1),)
    assert ev.OpenGate(1) in run.send(ev.WorldRestored(0.0, 1))
    run.answer("resumed")
    assert run.at(RunPhase.RUNNING) and "recovered" in says(run.answer("first_done"))


def test_a_node_that_had_a_place_before_takes_another() -> None:
    """Its old workers are ended at once, and where its gate was is forgotten: the end of one of them begins no world."""
    run = node()
    assert says(run.send(ev.PeerFailed(0.0, "node 1 is gone"))) == ["peer_failed"]
    old = run.state.leaving
    assert run.at(RunPhase.RESTARTING) and old
    orders = run.send(ev.Seated(0.0, 2))
    assert [order.worker for order in orders if isinstance(order, ev.Fence)] == [*old]
    assert kinds(orders).index("ResetGate") < kinds(orders).index("CloseGate")
    for cell in old:
        run.send(ev.Died(0.0, cell, "SIGKILL"))
    assert run.at(RunPhase.STOPPING)


def test_a_node_whose_place_another_one_has_ends_its_ranks_at_once() -> None:
    """A worker that is given time to end would write a checkpoint beside its successor."""
    run = node()
    ranks = [run.holder(0), run.holder(1)]
    orders = run.send(ev.PeerFailed(0.0, "another one has its place", evicted=True))
    assert says(orders) == ["evicted"] and run.at(RunPhase.RESTARTING) and not run.state.leaving
    assert {order.worker for order in orders if isinstance(order, ev.Fence)} >= {*ranks} and "Dismiss" not in kinds(orders)


def test_a_drained_node_ends_well_and_at_once() -> None:
    """Nobody failed, so no rank is given time to tell of a failure; nor to end, since a spare node has its place."""
    run = node()
    ranks = [run.holder(0), run.holder(1)]
    orders = run.send(ev.WorldEnded(0.0, 0, "node 1 is drained", drained=True))
    assert [order.worker for order in orders if isinstance(order, ev.Fence)] == ranks
    assert says(orders) == ["drained"] and run.at(RunPhase.ENDING)
    assert only(orders, ev.Terminate) == ev.Terminate("node 1 is drained", failed=False)
    assert only(orders, ev.End).code == 0


@pytest.mark.parametrize("drained", [False, True])
def test_who_takes_a_place_says_why_it_is_free(drained: bool) -> None:
    run = Driver(2, 0, shared=True)
    said = [order for order in run.send(ev.Seated(0.0, 3, drained)) if isinstance(order, ev.Say)]
    assert [(say.what, say.detail) for say in said] == [("seated", "drained" if drained else "lost")]


def test_a_node_is_lost_when_ranks_have_left_the_loop() -> None:
    run = node()
    run.send(ev.LoopDone(0.0, run.holder(1), True))
    assert says(run.send(ev.WorldStops(0.0, "node 1 is gone", 1, node_lost=True))) == ["peer_failed"]


@pytest.mark.parametrize("unready", ["not protected", "finished"])
def test_a_node_that_cannot_take_part_starts_all_anew(unready: str) -> None:
    run = Driver(2, 1, shared=True).up(protect=unready != "not protected")
    if unready == "finished":
        run.send(ev.Finished(0.0, run.holder(1)))
    assert says(run.send(ev.WorldStops(0.0, "rank 5 on node 2 failed"))) == ["peer_failed"]
    assert run.at(RunPhase.RESTARTING)


def test_what_belongs_to_an_earlier_incident_is_late() -> None:
    run = node()
    run.kill(run.holder(0))
    assert run.send(ev.WorldDecided(0.0, 2, 5)) == (), "this node has not answered"
    run.close(4)
    run.answer("stopped", (1,))
    assert run.send(ev.WorldDecided(0.0, 1, 5)) == ()
    run.send(ev.WorldStops(0.0, "rank 5 on node 2 failed"))
    assert run.state.generation == 3
    assert run.send(ev.WorldDecided(0.0, 2, 5)) == () and run.at(RunPhase.STOPPING)
    run.close(4)
    run.answer("stopped", (1,))
    run.send(ev.WorldDecided(0.0, 3, 5))
    assert run.send(ev.WorldRestored(0.0, 2)) == () and not run.state.opened
    run.send(ev.WorldRestored(0.0, 3))
    assert run.send(ev.WorldRestored(0.0, 3)) == (), "once is enough"


@pytest.mark.parametrize("stage", [None, "restored"])
def test_a_second_death_in_the_repair_begins_the_next_one(stage: str | None) -> None:
    """A replacement that is not restored has nothing to stop, and is not waited for."""
    run = node()
    run.kill(run.holder(0))
    run.close(4)
    run.answer("stopped", (1,))
    run.send(ev.WorldDecided(0.0, 2, 5))
    if stage:
        run.answer(stage)
    assert ev.CloseGate(3) in run.kill(run.holder(1))
    orders = run.close(4) if stage is None else (*run.close(4), *run.answer("stopped", (0,)))
    assert orders == (told(3, 4, (0, 1)) if stage is None else told(3, 4, (1,), (run.holder(0), 1)),)


@pytest.mark.parametrize("stage", ["ready", "reset", "restored"])
def test_a_repair_that_waits_for_ranks_of_another_node_is_not_given_up(stage: str) -> None:
    run = node()
    stopped_by_another(run)
    run.send(ev.WorldDecided(0.0, 2, 5))
    run.answer(stage)
    assert run.stall() == () and run.at(RunPhase.REPAIRING)


def test_a_replacement_that_hangs_after_it_met_the_others_is_given_up() -> None:
    run = node()
    run.kill(run.holder(0))
    run.close(4)
    run.answer("stopped", (1,))
    run.send(ev.WorldDecided(0.0, 2, 5))
    run.answer("reset", (0,))
    run.answer("reset", (1,))
    assert ev.CloseGate(3) in run.stall(run.holder(0), run.holder(1))


def test_a_death_after_the_decision_was_asked_for_begins_the_next_one() -> None:
    """The other nodes must know which ranks are lost: they may be about to copy from one."""
    run = node()
    stopped_by_another(run)
    worker = run.holder(1)
    run.send(ev.Dying(0.0, worker))
    assert run.send(ev.WorldDecided(0.0, 2, 5)) == (ev.DecideGate(2, 5),), "its exit code says what to do"
    assert ev.CloseGate(3) in run.kill(worker)
    run.close(4)
    assert run.answer("stopped", (0,)) == (told(3, 4, (1,)),)


def test_a_doubt_that_comes_while_the_others_still_restore_ends_a_run_that_must_be_exact() -> None:
    run = node(inexact_stops=True)
    run.kill(run.holder(0))
    run.close(4)
    run.answer("stopped", (1,))
    run.send(ev.WorldDecided(0.0, 2, 5))
    run.answer("restored")
    assert says(run.send(ev.Doubted(0.0, run.holder(1), "1 not kept"))) == ["inexact"]


def refused(snapshot: int) -> Driver:
    """A replacement of this node's rank 0 finds no source for its state, and its node has a host snapshot of gate number `snapshot`."""
    run = node()
    run.kill(run.holder(0))
    run.close(4)
    run.answer("stopped", (1,))
    run.send(ev.WorldDecided(0.0, 2, 5))
    run.send(ev.Unrestorable(0.0, run.holder(0), 2, "its shard is no other rank's", snapshot, requeue=True))
    return run


def test_a_rank_that_cannot_be_restored_asks_all_nodes_to_go_back() -> None:
    run = refused(snapshot=4)
    assert run.at(RunPhase.STOPPING) and run.state.generation == 3
    run.close(4)
    assert run.answer("stopped", (1,)) == (ev.TellStopped(3, 4, (0,), (0, 1), back=True),), "the dead worker's cell shows its snapshots"
    orders = run.send(ev.WorldDecided(0.0, 3, 2, rollback=True))
    assert orders[0] == ev.DecideGate(3, 2), "ranks that wait at their gate leave it"
    publish = only(orders, ev.Publish)
    assert (publish.resume, publish.rollback, publish.replaced) == (2, True, (0,)), "the nodes have no newer one in common"


def test_on_a_spare_node_the_workers_that_bring_the_host_snapshots_show_them() -> None:
    """Nothing of a lost node is here; who has brought a copy shows it, also when all are stopped again."""
    run = Driver(2, 1, shared=True)
    run.send(ev.Seated(0.0, 1))
    run.close(-1)
    run.send(ev.WorldDecided(0.0, 1, 5))
    first, second = run.holder(0), run.holder(1)
    run.send(ev.Unrestorable(0.0, first, 1, "its shard is no other rank's", 4, requeue=True))
    assert run.close(-1) == (ev.TellStopped(2, -1, (0, 1), (first, second), back=True),)
    run.send(ev.WorldDecided(0.0, 2, 4, rollback=True))
    run.kill(second)
    assert run.close(-1) == (ev.TellStopped(3, -1, (0, 1), (first, NOWHERE), back=True),)


def test_without_a_host_snapshot_a_rank_that_cannot_be_restored_ends_the_world() -> None:
    run = refused(snapshot=-1)
    assert run.at(RunPhase.RESTARTING)


def test_a_node_goes_back_with_the_others_and_again_if_they_are_stopped_meanwhile() -> None:
    run = node()
    stopped_by_another(run)
    assert only(run.send(ev.WorldDecided(0.0, 2, 2, rollback=True)), ev.Publish).rollback
    run.send(ev.WorldStops(0.0, "rank 5 on node 2 failed", 2))
    run.close(1)
    assert run.answer("stopped") == (ev.TellStopped(3, 1, (), (0, 1), back=True),), "a rank of it may have loaded half of the snapshot"
    assert only(run.send(ev.WorldDecided(0.0, 3, 2, rollback=True)), ev.Publish).rollback
    run.answer("restored")
    run.send(ev.WorldRestored(0.0, 3))
    run.answer("resumed")
    assert run.at(RunPhase.RUNNING) and run.state.rollback == -1


def test_a_node_whose_rank_has_left_the_loop_has_nothing_to_go_back_to() -> None:
    run = node()
    run.send(ev.LoopDone(0.0, run.holder(1), True))
    run.send(ev.WorldStops(0.0, "rank 5 on node 2 failed"))
    run.close(4)
    assert run.answer("stopped") == (told(2, 4, (), ()),)
