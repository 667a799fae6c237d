"""What the controller does about exceptions, budgets, spares, services, the tail of a script, restarts and ends."""

from __future__ import annotations

from typing import Any

import pytest

from ftrun.control import events as ev
from ftrun.control.machine import Phase
from ftrun.control.policy import Overrides
from tests.unit.driver import STAGES, Driver, in_incident, in_restart, kinds, only, says

# ---- exceptions and budgets ------------------------------------------------------------------------------------------


def test_an_exception_in_a_body_is_retried_once() -> None:
    run = Driver(3, 0).up()
    actions = run.send(ev.Raised(0.0, 0, 5, "ValueError", 1))
    assert kinds(actions) == ["Say", "CloseGate", "Deadline"]
    assert run.send(ev.Raised(0.0, 1, 5, "ValueError", 1)) == ()  # the same one, of the same generation
    run.recover()
    assert ev.Publish(2, 5, (0, 1, 2), (), ()) in run.orders
    assert kinds(run.send(ev.Raised(0.0, 2, 5, "KeyError", 2))) == ["Say", "CloseGate", "Deadline"]
    run.recover()
    actions = run.send(ev.Raised(0.0, 2, 5, "ValueError", 3))
    assert says(actions) == ["raised_again"]
    assert only(actions, ev.End).code == 1


def test_the_same_exception_at_another_step_is_another_one() -> None:
    run = Driver().up()
    run.send(ev.Raised(0.0, 0, 5, "ValueError", 1))
    run.recover()
    assert says(run.send(ev.Raised(0.0, 0, 6, "ValueError"))) == ["raised"]
    run.recover(5)
    assert says(run.send(ev.Raised(0.0, 1, 6, "ValueError"))) == ["raised_again"]


@pytest.mark.parametrize("facts", [{"signature": "ValueError", "code": 1}, {"code": 3, "cause": "exit 3"}], ids=str)
def test_the_same_failure_twice_is_the_programs(facts: dict[str, Any]) -> None:
    run = Driver(2, 0).up()
    assert says(run.kill(0, **facts)) == ["died"]
    run.kill(1, **facts)  # at the same time: counts once
    run.recover()
    actions = run.kill(run.holder(1), **facts)
    assert says(actions) == ["died", "failed_again"]
    assert only(actions, ev.End).code == 1


def test_too_many_replacements_within_the_window() -> None:
    run = Driver(2, 0, max_replacements=2, replacement_window=100.0).up()
    for _ in range(2):
        run.kill(run.holder(0))
        run.recover()
    run.kill(run.holder(1))
    run.recover()
    run.t = 50.0
    actions = run.kill(run.holder(0))
    assert says(actions) == ["died", "too_many_replacements"]
    assert only(actions, ev.End).code == 75
    assert run.at(Phase.ENDING)


def test_a_drain_is_no_failure() -> None:
    run = Driver(2, 1, max_replacements=0).up()
    for _ in range(3):
        assert says(run.kill(run.holder(1), cause="drain", fault="drain")) == ["died"]
        run.recover()
    assert run.at(Phase.RUNNING)
    assert says(run.kill(run.holder(1))) == ["died", "too_many_replacements"]


def test_old_replacements_are_forgotten() -> None:
    run = Driver(2, 0, max_replacements=2, replacement_window=100.0).up()
    for _ in range(9):
        run.kill(run.holder(0))
        run.recover()
        run.t += 60.0
    assert run.at(Phase.RUNNING)


# ---- spares and services ---------------------------------------------------------------------------------------------


def test_spares_are_replaced_in_quiet_times_only() -> None:
    run = Driver(2, 2).up()
    assert run.kill(2) == (ev.Fence(2), ev.Say("spare_died", 2, None, "SIGKILL"), ev.Spawn(4, None))
    run.kill(0)
    run.close()
    assert run.kill(4) == (ev.Fence(4), ev.Say("spare_died", 4, None, "SIGKILL"))
    for stage in STAGES:
        run.answer(stage)
    assert [s.cell for s in run.state.spares()] == [5, 6]


def test_spares_that_never_park_are_given_up() -> None:
    run = Driver(1, 1).begin()
    run.send(ev.Started(0.0, 0))
    assert says(run.kill(1)) == ["spare_died"]
    assert says(run.kill(2)) == ["spare_died"]
    actions = run.kill(3)
    assert kinds(actions) == ["Fence", "Say", "Say"]
    assert says(actions) == ["spare_died", "spares_given_up"]
    assert run.state.spares() == []


def test_a_script_that_asks_for_no_rank_has_no_spares() -> None:
    run = Driver(1, 2).begin()
    run.send(ev.Started(0.0, 0))
    assert run.send(ev.Finished(0.0, 2)) == (ev.Fence(2), ev.Say("spare_unneeded", 2))
    assert run.send(ev.Finished(0.0, 1)) == (ev.Fence(1),)
    assert run.state.spares() == []
    assert run.at(Phase.RUNNING)


def test_a_parked_spare_starts_the_count_anew() -> None:
    run = Driver(1, 1).begin()
    run.send(ev.Started(0.0, 0))
    for cell in range(1, 12):
        if cell % 3 == 0:
            run.send(ev.Parked(0.0, cell))
        run.kill(cell)
    assert len(run.state.spares()) == 1


def test_services_are_started_again_but_not_for_ever() -> None:
    run = Driver().up()
    for _ in range(5):
        assert kinds(run.send(ev.ServiceDied(run.t, "store"))) == ["Say", "StartService"]
        run.send(ev.ServiceReady(run.t, "store"))
    run.send(ev.ServiceDied(run.t, "keeper"))
    run.t = 61.0
    run.send(ev.ServiceDied(run.t, "store"))
    for _ in range(4):
        run.send(ev.ServiceDied(run.t, "store"))
    actions = run.send(ev.ServiceDied(run.t, "store"))
    assert says(actions) == ["service_given_up"]
    assert only(actions, ev.End).code == 1


@pytest.mark.parametrize("stages", range(7))
def test_a_store_that_dies_before_all_have_met_is_met_in_again(stages: int) -> None:
    run = in_incident(stages)
    generation = run.state.generation
    run.send(ev.ServiceDied(0.0, "store"))
    if stages < 4:
        run.send(ev.Stage(0.0, run.holder(0), generation, "reset"))  # one of two
    actions = run.send(ev.ServiceReady(0.0, "store"))
    if stages < 4:
        assert kinds(actions) == ["CloseGate", "Deadline"]
        assert run.state.generation == generation + 1
        run.recover()
    else:
        assert actions == ()
        assert run.state.generation == generation


def test_a_store_that_dies_before_the_new_world_is_published_costs_no_generation() -> None:
    run = Driver().up()
    run.kill(1)
    run.send(ev.ServiceDied(0.0, "store"))
    run.close()  # the agent holds the world file back until there is a store
    assert run.send(ev.ServiceReady(0.0, "store")) == ()
    assert run.state.generation == 2


def test_exceptions_for_want_of_a_store_are_not_the_programs() -> None:
    run = Driver(max_replacements=1).up()
    run.kill(1)
    run.close()
    run.send(ev.ServiceDied(0.0, "store"))
    run.kill(run.holder(1), code=1, cause="exit 1", signature="DistNetworkError at train.py:3")
    assert run.at(Phase.STOPPING)
    run.send(ev.ServiceReady(0.0, "store"))
    run.recover()


def test_a_start_that_the_store_spoiled_is_made_again() -> None:
    run = Driver().begin()
    run.raise_world(protect=False)
    run.send(ev.ServiceDied(0.0, "store"))
    run.send(ev.ServiceReady(0.0, "store"))
    assert says(run.kill(0, code=1, cause="exit 1", signature="E at train.py:3")) == ["died", "restarting"]
    # an hour later the same death is the program's
    run = Driver().begin()
    run.raise_world(protect=False)
    run.send(ev.ServiceDied(0.0, "store"))
    run.send(ev.ServiceReady(0.0, "store"))
    run.t = 3600.0
    assert says(run.kill(0, code=1, cause="exit 1", signature="E at train.py:3")) == ["died", "failed"]


def test_when_everybody_waits_all_connections_are_made_again_once() -> None:
    run = Driver().up()
    assert kinds(run.send(ev.Stuck(0.0, 5, 1, "allreduce"))) == ["Say", "CloseGate", "Deadline"]
    run.recover()
    assert run.state.deaths == ()
    assert only(tuple(run.orders[-10:]), ev.OpenGate).generation == 2
    actions = run.send(ev.Stuck(0.0, 5, 2, "allreduce"))
    assert says(actions) == ["stuck_again"]
    assert only(actions, ev.End).code == 1
    # another step later is another matter, and so is a script that cannot be stopped in place
    run = Driver().up()
    run.send(ev.Stuck(0.0, 5, 1, "allreduce"))
    run.recover()
    assert says(run.send(ev.Stuck(0.0, 9, 2, "allreduce"))) == ["stuck"]
    run = Driver().up(protect=False)
    assert run.send(ev.Stuck(0.0, 5, 1, "allreduce")) == ()


def test_a_new_nursery_is_asked_for_what_has_not_started() -> None:
    run = Driver().begin()
    run.send(ev.Started(0.0, 0))
    run.send(ev.ServiceDied(0.0, "nursery"))
    assert run.send(ev.ServiceReady(0.0, "nursery")) == (ev.Spawn(1, 1), ev.Spawn(2, None))


# ---- the tail --------------------------------------------------------------------------------------------------------


def test_a_death_after_the_loop_stops_nobody() -> None:
    run = Driver(3, 1).up()
    for rank in range(3):
        run.send(ev.LoopDone(0.0, rank))
    run.send(ev.Finished(0.0, 0))
    actions = run.kill(1, loop_done=True)
    assert kinds(actions) == ["Fence", "Say", "Publish", "Deadline"]
    assert only(actions, ev.Publish) == ev.Publish(2, -1, (0, 3, 2), (1,), (1,), tail=True)
    assert run.at(Phase.RUNNING)
    # Its replacement dies before it has the state, and another rank with it.
    published = only(run.kill(3), ev.Publish)
    assert (published.workers, published.replaced, published.lost) == ((0, 4, 2), (1,), (1,))
    published = only(run.kill(2, loop_done=True), ev.Publish)
    assert (published.generation, published.replaced, published.lost) == (4, (1, 2), (1, 2))
    run.send(ev.Stage(0.0, 4, 3, "restored"))
    assert says(run.send(ev.Stage(0.0, 5, 4, "restored"))) == ["recovered"]
    run.send(ev.Finished(0.0, 4))
    assert only(run.send(ev.Finished(0.0, 5)), ev.End).code == 0


def test_a_replacement_after_the_loop_that_never_gets_there_is_replaced_too() -> None:
    run = Driver(3, 1, max_replacements=2).up()
    for rank in range(3):
        run.send(ev.LoopDone(0.0, rank))
    due = only(run.kill(1, loop_done=True), ev.Deadline)
    assert due == ev.Deadline("recover", 2, run.config.recover_timeout)
    actions = run.expire("recover")
    assert says(actions) == ["died"] and only(actions, ev.Fence).worker == 3
    assert only(actions, ev.Publish).workers == (0, 5, 2)
    assert run.expire("recover", 2) == (), "that one is over"
    run.send(ev.Stage(0.0, 5, 3, "restored"))
    assert run.expire("recover") == (), "it is there: how long the script's tail takes is its own business"
    assert run.at(Phase.RUNNING)


def test_after_a_tail_the_gate_is_closed_into_the_next_generation() -> None:
    run = Driver(2, 0).up()
    run.kill(0, loop_done=True)
    assert only(run.kill(1), ev.CloseGate).generation == 3
    assert only(run.close(), ev.Publish).replaced == (0, 1)


def test_a_rank_in_its_loop_cannot_come_back_after_another_has_finished() -> None:
    run = Driver().up()
    run.send(ev.Finished(0.0, 0))
    actions = run.kill(1)
    assert says(actions) == ["died", "restarting"]  # the script wants recovery: a start-up restart
    run = Driver(max_replacements=0).up()
    run.send(ev.Finished(0.0, 0))
    assert says(run.send(ev.Raised(0.0, 1, 5, "ValueError", 1))) == ["cannot_recover"]
    assert run.state.exit_code == 1


# ---- restarts and ends -----------------------------------------------------------------------------------------------


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
    assert run.at(Phase.RUNNING)
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
        assert run.at(Phase.RESTARTING)
        run.leave()
        waits = [a.seconds for a in actions if isinstance(a, ev.Deadline) and a.name == "backoff"]
        pauses += waits
        if waits:
            assert run.at(Phase.RESTARTING)
            run.expire("backoff", 1)
            assert run.at(Phase.RESTARTING)
            run.expire("backoff")
        assert run.at(Phase.STARTING)
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


def test_a_store_that_dies_while_restarting_is_waited_for() -> None:
    run = in_restart()
    run.leave()
    assert ev.StartService("store") in run.send(ev.ServiceDied(0.0, "store"))
    run.send(ev.ServiceReady(0.0, "keeper"))
    assert run.at(Phase.RESTARTING)
    run.send(ev.ServiceReady(0.0, "store"))
    assert run.at(Phase.STARTING)


def test_workers_that_do_not_leave_are_killed() -> None:
    run = in_restart()
    run.send(ev.ServiceReady(0.0, "store"))
    assert run.at(Phase.RESTARTING)
    assert run.state.leaving == (1,)
    actions = run.expire("leave")
    assert actions[0] == ev.Fence(1)
    assert run.at(Phase.STARTING)


def test_a_second_signal_kills_those_that_leave_too() -> None:
    run = in_restart()
    run.send(ev.Signalled(0.0, 2))
    assert ev.Fence(1) in run.send(ev.Signalled(0.0, 2))


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
    assert run.at(Phase.STOPPING)
    # the other one gave up as well, in the world before: it hears of the snapshot by itself
    assert run.send(ev.Unrestorable(0.0, second, generation, "all died", 6)) == ()
    publish = only(run.close(last=7), ev.Publish)
    assert publish.rollback and publish.resume == 6
    assert publish.workers == (first, second) and publish.replaced == (0, 1)
    for stage in STAGES:
        run.answer(stage)
    assert run.at(Phase.RUNNING)
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


def test_the_run_is_done_when_every_rank_has_finished() -> None:
    run = Driver().begin()
    run.send(ev.Finished(0.0, 1))
    assert run.at(Phase.STARTING)
    actions = run.send(ev.Finished(0.0, 0))
    assert actions == (ev.Say("done"), ev.Terminate("done"), ev.End(0, "done"))
    assert run.kill(1) == ()


def test_signals_end_the_run() -> None:
    run = Driver().up()
    actions = run.send(ev.Signalled(0.0, 2))
    assert kinds(actions) == ["Say", "Terminate", "End"]
    assert only(actions, ev.End).code == 130
    assert run.kill(0) == ()
    actions = run.send(ev.Signalled(0.0, 15))
    assert kinds(actions) == ["Fence", "Fence", "Fence", "End"]
    assert only(actions, ev.End).code == 130
    assert run.at(Phase.ENDED)


def test_an_exception_heard_only_after_its_recovery_starts_no_new_one() -> None:
    run = Driver().up()
    run.kill(1)
    run.recover()
    assert run.send(ev.Raised(0.0, 0, 5, "ValueError", 1)) == ()
    assert run.at(Phase.RUNNING)


def test_a_report_changes_nothing_and_names_the_rank() -> None:
    run = Driver().up()
    before = run.state
    actions = run.send(ev.Noticed(0.0, run.holder(1), "straggler", "slow"))
    assert actions == (ev.Say("noticed", run.holder(1), 1, "slow"),)
    assert run.send(ev.Noticed(0.0, None, "disk-full", "no room")) == (ev.Say("noticed", None, None, "no room"),)
    assert run.state == before


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("report", ["noticed"]),
        ("replace", ["died"]),
        ("stop", ["stopped_by_policy"]),
        ("roll-back", ["died", "restarting"]),
    ],
)
def test_the_policy_may_do_more_about_a_report(response: str, expected: list[str]) -> None:
    run = Driver(policy=Overrides((("straggler", response),)), max_restarts=1).up()
    assert says(run.send(ev.Noticed(0.0, run.holder(1), "straggler", "slow"))) == expected
    run = Driver(policy=Overrides((("disk-full", "stop"),))).up()
    assert says(run.send(ev.Noticed(0.0, None, "disk-full", "no room"))) == ["stopped_by_policy"]


@pytest.mark.parametrize(
    ("response", "expected"), [("redo", ["raised"]), ("replace", ["died"]), ("stop", ["stopped_by_policy"])]
)
def test_poisoned_gradients_have_a_row_of_their_own(response: str, expected: list[str]) -> None:
    run = Driver(policy=Overrides((("nonfinite", response),))).up()
    raised = ev.Raised(0.0, run.holder(1), 5, "NonFiniteError at train.py:3", 1, "nonfinite", "not finite")
    assert says(run.send(raised)) == expected
    run = Driver(policy=Overrides((("nonfinite", response),))).up()
    assert says(run.send(ev.Raised(0.0, run.holder(1), 5, "ValueError at train.py:3", 1))) == ["raised"]
