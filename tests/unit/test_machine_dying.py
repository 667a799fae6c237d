"""A death that is noticed before its exit code shows: the world stops at once, the policy waits for the code."""

from __future__ import annotations

import pytest

from ftrun.control import events as ev
from ftrun.control.machine import RunPhase
from ftrun.control.policy import Overrides
from ftrun.control.replay import replay
from tests.unit.driver import Driver, kinds, only, says


def dying(run: Driver, rank: int) -> tuple[ev.Action, ...]:
    return run.send(ev.Dying(run.t, run.holder(rank)))


@pytest.mark.parametrize("first", ["gate", "code"])
def test_the_world_stops_at_once_and_is_published_when_gate_and_code_are_known(first: str) -> None:
    run = Driver().up()
    cell = run.holder(1)
    assert kinds(dying(run, 1)) == ["CloseGate", "Deadline"]
    assert run.at(RunPhase.STOPPING) and run.state.generation == 2
    if first == "gate":
        assert run.close() == ()
        actions = run.kill(cell)
    else:
        assert kinds(run.kill(cell)) == ["Fence", "Say"]
        actions = run.close()
    world = only(actions, ev.Publish)
    assert (world.generation, world.resume, world.replaced, world.lost) == (2, 5, (1,), (cell,))
    for stage in ("stopped", "cleaned", "reset", "restored", "resumed", "first_done"):
        run.answer(stage)
    assert run.at(RunPhase.RUNNING) and replay(run.journal) == []


def test_the_same_exit_a_second_time_ends_the_run_though_its_code_shows_late() -> None:
    run = Driver().up()
    for again in (False, True):
        cell = run.holder(1)
        dying(run, 1)
        run.close()
        actions = run.kill(cell, cause="exit 3", code=3, fault="exit")
        if not again:
            for stage in ("stopped", "cleaned", "reset", "restored", "resumed", "first_done"):
                run.answer(stage)
    assert says(actions) == ["died", "failed_again"] and only(actions, ev.End).code == 1


@pytest.mark.parametrize("fault", ["exit", "oom"])
def test_a_row_of_the_users_policy_is_asked_when_the_code_is_known(fault: str) -> None:
    run = Driver(policy=Overrides(faults=((fault, "stop"),))).up()
    cell = run.holder(1)
    dying(run, 1)
    assert run.at(RunPhase.STOPPING)
    assert "stopped_by_policy" in says(run.kill(cell, cause="SIGKILL", fault=fault))
    assert run.at(RunPhase.ENDING)


def test_two_that_die_together_are_one_generation() -> None:
    run = Driver(3, 2).up()
    cells = run.holder(0), run.holder(2)
    dying(run, 0)
    assert dying(run, 2) == ()
    run.close()
    assert kinds(run.kill(cells[0])) == ["Fence", "Say"]
    world = only(run.kill(cells[1]), ev.Publish)
    assert (world.generation, world.replaced, world.lost) == (2, (0, 2), cells)


def test_one_that_begins_to_die_later_stops_the_world_again() -> None:
    run = Driver(3, 2).up()
    first = run.holder(0)
    dying(run, 0)
    run.close()
    assert only(run.kill(first), ev.Publish).replaced == (0,)
    second = run.holder(2)
    assert only(dying(run, 2), ev.CloseGate).generation == 3
    run.kill(second)
    world = only(run.close(), ev.Publish)
    assert (world.generation, world.replaced, world.lost) == (3, (0, 2), (first, second))


def test_a_code_that_never_shows_holds_the_world_no_longer_than_a_stop_may_take() -> None:
    run = Driver().up()
    cell = run.holder(1)
    dying(run, 1)
    run.close()
    run.answer("stopped", (0,))
    actions = run.expire("stop")
    assert only(actions, ev.Publish).lost == (cell,)
    assert run.kill(cell) == ()


def test_what_is_not_repaired_in_place_waits_for_the_code() -> None:
    run = Driver(max_restarts=1).up(protect=False)
    assert dying(run, 1) == () and run.at(RunPhase.RUNNING)
    assert "restarting" in says(run.kill(run.holder(1)))


def test_another_rank_that_finishes_between_a_death_and_its_code_is_no_obstacle_to_the_repair() -> None:
    run = Driver().up()
    cell = run.holder(0)
    run.send(ev.LoopDone(run.t, run.holder(1), True))
    dying(run, 0)
    run.close()
    run.send(ev.Finished(run.t, run.holder(1)))
    run.kill(cell)
    assert run.state.phase is not RunPhase.RESTARTING
