"""What the controller does when spares, the store, the fd store or the fork server die, and when all wait for each other."""

from __future__ import annotations

import pytest

from ftrun.control import events as ev
from ftrun.control.machine import RunPhase
from ftrun.control.policy import Overrides
from ftrun.core.faults import Fault
from tests.unit.driver import STAGES, Driver, in_incident, kinds, only, says


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
    assert run.at(RunPhase.RUNNING)


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
    run.send(ev.ServiceDied(run.t, "fd store"))
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
    assert run.at(RunPhase.STOPPING)
    run.send(ev.ServiceReady(0.0, "store"))
    run.recover()


def test_ranks_that_cannot_connect_for_want_of_a_store_wait_for_it() -> None:
    run = in_incident(3, policy=Overrides(faults=(("link", "stop"),)))
    run.send(ev.ServiceDied(0.0, "store"))
    for rank in range(2):
        assert run.send(unconnected(run, rank)) == ()
    assert kinds(run.send(ev.ServiceReady(0.0, "store"))) == ["CloseGate", "Deadline"]
    run.recover()


@pytest.mark.parametrize("others", [(), (1,)], ids=["nobody is connected", "the others are"])
def test_a_rank_that_cannot_connect_has_all_connections_made_again_then_loses_its_worker(
    others: tuple[int, ...],
) -> None:
    run = in_incident(3)
    run.answer("reset", others)
    workers, late = run.state.holder, unconnected(run, 1)
    actions = run.send(unconnected(run, 0))
    assert kinds(actions) == ["Say", "CloseGate", "Deadline"] and says(actions) == ["unconnected"]
    assert run.send(late) == (), "the stop is its answer, too"
    run.close()
    assert run.state.holder == workers, "nobody is replaced"
    assert run.send(late) == ()
    actions = run.send(unconnected(run, 1))
    assert says(actions) == ["died"] and only(actions, ev.Fence).worker == workers[1]
    run.recover()
    assert run.state.holder[0] == workers[0] and run.state.holder[1] != workers[1]
    # another incident, also at the same step, is another matter
    run.kill(run.holder(1))
    run.close()
    assert says(run.send(unconnected(run, 0))) == ["unconnected"]


def test_connections_that_fail_for_ever_end_the_run() -> None:
    run = in_incident(3, max_replacements=2)
    for _ in range(9):
        actions = run.send(unconnected(run, 0))
        if run.at(RunPhase.ENDING):
            break
        run.close()
    assert says(actions)[-1] == "too_many_replacements"
    assert only(actions, ev.End).code == 75


def test_the_policy_may_want_a_person_to_look_at_the_links() -> None:
    run = in_incident(3, policy=Overrides(faults=(("link", "stop"),)))
    actions = run.send(unconnected(run, 1))
    assert says(actions) == ["stopped_by_policy"]
    assert only(actions, ev.Say).detail == "rank 1: closed by peer"


def unconnected(run: Driver, rank: int) -> ev.Unconnected:
    return ev.Unconnected(0.0, run.holder(rank), run.state.generation, Fault.LINK.value, "closed by peer")


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


def test_a_new_fork_server_is_asked_for_what_has_not_started() -> None:
    run = Driver().begin()
    run.send(ev.Started(0.0, 0))
    run.send(ev.ServiceDied(0.0, "fork server"))
    assert run.send(ev.ServiceReady(0.0, "fork server")) == (ev.Spawn(1, 1), ev.Spawn(2, None))
