"""What the controller does when spares, the store, the keeper or the nursery die, and when all wait for each other."""

from __future__ import annotations

import pytest

from ftrun.control import events as ev
from ftrun.control.machine import Phase
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


def test_ranks_that_cannot_connect_for_want_of_a_store_wait_for_it() -> None:
    run = in_incident(3)
    run.send(ev.ServiceDied(0.0, "store"))
    for worker in run.state.holder:
        assert worker is not None
        assert run.send(cut_off(worker, run.state.generation)) == ()
    assert kinds(run.send(ev.ServiceReady(0.0, "store"))) == ["CloseGate", "Deadline"]
    run.recover()


@pytest.mark.parametrize("stages", [3, 4])
def test_a_rank_that_cannot_connect_has_all_connections_made_again_once(stages: int) -> None:
    run = in_incident(stages)
    generation, workers = run.state.generation, run.state.holder
    assert None not in workers
    actions = run.send(cut_off(workers[0] or 0, generation))
    assert kinds(actions) == ["Say", "CloseGate", "Deadline"] and says(actions) == ["raised"]
    assert run.state.generation == generation + 1
    assert run.send(cut_off(workers[1] or 0, generation)) == (), "the stop is its answer, too"
    run.recover()
    assert run.state.holder == workers, "nobody is replaced"
    run.kill(workers[1] or 0)
    run.close()
    actions = run.send(cut_off(run.holder(1), run.state.generation))
    assert says(actions) == ["raised_again"]
    assert only(actions, ev.End).code == 1


def cut_off(worker: int, generation: int) -> ev.Raised:
    return ev.Raised(0.0, worker, 5, "RuntimeError while connecting", generation, Fault.LINK.value, "closed by peer")


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
