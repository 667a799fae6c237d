"""What the controller does when a rank cannot be repaired in place: restarts of all workers, and the host snapshot."""

from __future__ import annotations

import pytest

from ftrun.control import events as ev
from ftrun.control.machine import RunPhase
from tests.unit.driver import STAGES, Driver, in_restart, kinds, only, says


def test_a_script_without_protect_restarts_as_often_as_asked() -> None:
    run = Driver(2, 1, max_restarts=1).up(protect=False)
    actions = run.kill(1, cause="exit 1", code=1)
    assert actions == (
        ev.Fence(1),
        ev.Say("died", 1, 1, "exit 1"),
        ev.Say("restarting", 1, 1, "exit 1", attempt="2 of 2"),
        ev.Dismiss(0),
        ev.Fence(1),
        ev.Fence(2),  # the spare ran the script up to its rank: what it read there may be old
        ev.StartService("store"),
        ev.Deadline("leave", 2, 30.0),
    )
    run.leave()
    assert run.send(ev.ServiceReady(0.0, "store")) == (
        ev.ResetGate(2),
        ev.Publish(2, 0, (3, 4), (), (), fresh=True, attempt=1),
        ev.Spawn(3, 0),
        ev.Spawn(4, 1),
        ev.Deadline("start", 2, 300.0),
    )
    run.raise_world(protect=False)
    assert run.at(RunPhase.RUNNING)
    actions = run.kill(4, cause="exit 1", code=1)
    assert says(actions) == ["died", "failed"]
    assert only(actions, ev.End).code == 1


def test_start_up_failures_restart_with_a_growing_pause() -> None:
    run = Driver(2, 0, max_replacements=4)
    run.begin()
    pauses = []
    for _ in range(4):
        run.raise_world(protect=False)
        run.send(ev.Grouped(run.t, run.holder(0)))
        actions = run.kill(run.holder(1))
        run.send(ev.ServiceReady(run.t, "store"))
        assert run.at(RunPhase.RESTARTING)
        run.leave()
        waits = [a.seconds for a in actions if isinstance(a, ev.Deadline) and a.name == "backoff"]
        pauses += waits
        if waits:
            assert run.at(RunPhase.RESTARTING)
            run.expire("backoff", 1)
            assert run.at(RunPhase.RESTARTING)
            run.expire("backoff")
        assert run.at(RunPhase.STARTING)
    assert pauses == [0.5, 1.0, 2.0]
    run.raise_world(protect=False)
    run.t = 70.0
    run.send(ev.Grouped(run.t, run.holder(0)))
    assert says(run.kill(run.holder(1))) == ["died", "failed"]


def test_an_attempt_that_came_to_something_is_no_start_up_failure() -> None:
    run = Driver(1, 0, max_restarts=9).begin()
    for _ in range(9):
        run.raise_world(protect=False)
        run.t += 60.0
        assert "Deadline" not in kinds(run.kill(run.holder(0)))
        run.send(ev.ServiceReady(run.t, "store"))


def test_the_same_start_up_failure_twice_is_the_programs() -> None:
    run = Driver(2, 0).up(protect=False)
    run.send(ev.Grouped(0.0, 0))
    assert says(run.kill(1, code=1, signature="ImportError")) == ["died", "restarting"]
    run.leave()
    run.send(ev.ServiceReady(0.0, "store"))
    run.raise_world(protect=False)
    run.send(ev.Grouped(0.0, run.holder(0)))
    assert says(run.kill(run.holder(0), code=1, signature="ImportError")) == ["died", "failed_again"]


@pytest.mark.parametrize("protect", [False, True])
def test_no_start_up_restart_once_an_optimizer_took_a_step(protect: bool) -> None:
    """What nobody asked for must throw nothing away: then only --max-restarts allows it."""
    run = Driver(2, 0, max_restarts=1).begin()
    for allowed in (True, False):
        run.raise_world(protect=protect)
        for rank in range(2):
            run.send(ev.Grouped(run.t, run.holder(rank)))
        run.send(ev.Stepped(run.t, run.holder(0)))
        if protect:  # another rank has finished: nobody can be repaired in place
            run.send(ev.Finished(run.t, run.holder(0)))
        actions = run.kill(run.holder(1), code=1)
        assert ("restarting" in says(actions)) == allowed, says(actions)
        if allowed:
            run.leave()
            run.send(ev.ServiceReady(run.t, "store"))
    assert only(actions, ev.End).code == 1


def test_an_attempt_that_took_no_step_yet_may_start_again() -> None:
    run = Driver(2, 0, max_restarts=1).begin()
    run.raise_world(protect=False)
    run.send(ev.Grouped(run.t, run.holder(0)))
    run.send(ev.Stepped(run.t, run.holder(0)))
    assert "restarting" in says(run.kill(run.holder(1)))
    run.leave()
    run.send(ev.ServiceReady(run.t, "store"))
    run.raise_world(protect=False)
    run.send(ev.Grouped(run.t, run.holder(0)))
    assert "restarting" in says(run.kill(run.holder(1))), "the second attempt had done nothing that could be lost"


def test_a_store_that_dies_while_restarting_is_waited_for() -> None:
    run = in_restart()
    run.leave()
    assert ev.StartService("store") in run.send(ev.ServiceDied(0.0, "store"))
    run.send(ev.ServiceReady(0.0, "fd store"))
    assert run.at(RunPhase.RESTARTING)
    run.send(ev.ServiceReady(0.0, "store"))
    assert run.at(RunPhase.STARTING)


def test_workers_that_do_not_leave_are_killed() -> None:
    run = in_restart()
    run.send(ev.ServiceReady(0.0, "store"))
    assert run.at(RunPhase.RESTARTING)
    assert run.state.leaving == (1,)
    actions = run.expire("leave")
    assert actions[0] == ev.Fence(1)
    assert run.at(RunPhase.STARTING)


@pytest.mark.parametrize("parked", [False, True])
def test_no_spare_reaches_the_next_world(parked: bool) -> None:
    run = Driver(1, 1, max_restarts=1).begin()
    run.send(ev.Parked(0.0, 1) if parked else ev.Started(0.0, 1))
    assert [a.worker for a in run.kill(0) if isinstance(a, ev.Fence)] == [0, 0, 1]


def test_an_exception_before_everyone_is_protected_restarts_the_world() -> None:
    run = Driver(max_restarts=1).up(protect=False)
    assert says(run.send(ev.Raised(0.0, 0, 0, "ValueError", 1))) == ["restarting"]


def test_a_rank_that_nobody_can_restore_restarts_the_world() -> None:
    run = Driver(max_restarts=1).up()
    run.kill(1)
    run.close()
    assert run.send(ev.Unrestorable(0.0, 0, 2, "not me")) == ()  # nobody asked this one
    assert says(run.send(ev.Unrestorable(0.0, 2, 2, "no replica"))) == ["restarting"]
    run = Driver().up()
    run.kill(1)
    run.close()
    actions = run.send(ev.Unrestorable(0.0, 2, 2, "no replica"))
    assert says(actions) == ["unrestorable"]
    assert only(actions, ev.End).code == 1


def test_what_cannot_be_restored_is_heard_after_another_stop_too() -> None:
    run = Driver(3).up()
    run.kill(1)
    run.close()
    run.kill(2)
    assert run.state.generation == 3
    assert says(run.send(ev.Unrestorable(0.0, 3, 2, "no replica"))) == ["unrestorable"]


def _all_dead(run: Driver) -> None:
    for rank in range(run.config.nproc):
        run.kill(run.holder(rank))
    run.close(last=7)


def test_everyone_goes_back_to_the_snapshot_when_no_replica_is_left() -> None:
    run = Driver(2).up()
    _all_dead(run)
    first, second = run.holder(0), run.holder(1)
    generation = run.state.generation
    actions = run.send(ev.Unrestorable(0.0, first, generation, "all died", 6))
    assert says(actions) == ["rolling_back"]
    assert run.at(RunPhase.STOPPING)
    # the other one gave up as well, in the world before: it hears of the snapshot by itself
    assert run.send(ev.Unrestorable(0.0, second, generation, "all died", 6)) == ()
    publish = only(run.close(last=7), ev.Publish)
    assert publish.rollback and publish.resume == 6
    assert publish.workers == (first, second) and publish.replaced == (0, 1)
    for stage in STAGES:
        run.answer(stage)
    assert run.at(RunPhase.RUNNING)
    run.kill(first)
    publish = only(run.close(last=6), ev.Publish)
    assert not publish.rollback and publish.resume == 7


def test_a_fault_while_everyone_goes_back_starts_that_again() -> None:
    run = Driver(2).up()
    _all_dead(run)
    run.send(ev.Unrestorable(0.0, run.holder(0), run.state.generation, "all died", 6))
    run.close(last=7)
    run.kill(run.holder(1))
    publish = only(run.close(last=5), ev.Publish)
    assert publish.rollback and publish.resume == 6


def test_a_snapshot_that_cannot_be_used_leaves_a_restart() -> None:
    run = Driver(2, max_restarts=1).up()
    _all_dead(run)
    run.send(ev.Unrestorable(0.0, run.holder(0), run.state.generation, "all died", 6))
    run.close(last=7)
    assert says(run.send(ev.Unrestorable(0.0, run.holder(0), run.state.generation, "bad checksum"))) == ["restarting"]
    assert run.state.rollback == -1


def test_nobody_goes_back_into_a_loop_that_a_rank_has_left() -> None:
    run = Driver(2).up()
    run.kill(run.holder(1))
    run.close(last=7)
    run.send(ev.LoopDone(0.0, run.holder(0)))
    actions = run.send(ev.Unrestorable(0.0, run.holder(1), run.state.generation, "no replica", 6))
    assert says(actions) == ["unrestorable"]
