"""The controller's rules, one test each, and its table: every entry is exercised, everything else is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from ftrun.control import events as ev
from ftrun.control import machine as m
from ftrun.control.machine import RunPhase
from tests.unit.driver import STAGES, Driver, in_incident, in_restart, kinds, only, says

# ---- the table -------------------------------------------------------------------------------------------------------


def in_stop() -> Driver:
    run = Driver().up()
    run.kill(1)
    return run


def _ending(signals: int) -> Driver:
    run = Driver().up()
    for _ in range(signals):
        run.send(ev.Signalled(0.0, 15))
    return run


IN_PHASE: dict[RunPhase, Callable[[], Driver]] = {
    RunPhase.NEW: Driver,
    RunPhase.STARTING: lambda: Driver().begin(),
    RunPhase.RUNNING: lambda: Driver().up(),
    RunPhase.STOPPING: in_stop,
    RunPhase.REPAIRING: lambda: in_incident(2),
    RunPhase.RESTARTING: in_restart,
    RunPhase.ENDING: lambda: _ending(1),
    RunPhase.ENDED: lambda: _ending(2),
}

EVENTS: list[ev.Event] = [
    ev.Begin(1.0),
    ev.Started(1.0, 0),
    ev.Parked(1.0, 2),
    ev.Grouped(1.0, 0),
    ev.Stepped(1.0, 0),
    ev.Protected(1.0, 0),
    ev.LoopDone(1.0, 0),
    ev.Dying(1.0, 0),
    ev.Died(1.0, 0, "SIGKILL", 137),
    ev.Raised(1.0, 0, 5, "ValueError at train.py:3", 1),
    ev.Finished(1.0, 0),
    ev.GateClosed(1.0, 1, 4),
    ev.Stage(1.0, 0, 1, "stopped"),
    ev.Unrestorable(1.0, 0, 1, "no replica"),
    ev.Unconnected(1.0, 0, 1, "link", "closed by peer"),
    ev.Stalled(1.0, 1, (0,), 30.0, "train.py:7"),
    ev.Stuck(1.0, 5, 1, "allreduce"),
    ev.Doubted(1.0, 0, "1 not kept"),
    ev.Noticed(1.0, None, "disk-full", "no room"),
    ev.Expired(1.0, "stop", 1),
    ev.Signalled(1.0, 15),
    ev.ServiceDied(1.0, "fd store"),
    ev.ServiceReady(1.0, "fd store"),
    ev.PeerFailed(1.0, "node 1 is gone", 1),
    ev.WorldStops(1.0, "rank 3 on node 1 failed: SIGKILL"),
    ev.Seated(1.0, 2),
    ev.WorldDecided(1.0, 1, 5),
    ev.WorldRestored(1.0, 1),
    ev.WorldEnded(1.0, 1, "rank 3 failed"),
    ev.Devices(1.0, ("GPU-a", "GPU-b", "GPU-c"), ("GPU-c",)),
    ev.DeviceFault(1.0, "xid", ("GPU-a",), (0,), (), 13, 0, 5),
    ev.Probed(1.0, "GPU-a", True, (0,)),
    ev.DeviceOut(1.0, "GPU-c", "Xid 48"),
    ev.DeviceBack(1.0, "GPU-c"),
]


def test_every_event_has_a_sample() -> None:
    assert {type(e) for e in EVENTS} == {c for c in ev.Message.KINDS.values() if issubclass(c, ev.Event)} - {ev.Event}
    assert set(IN_PHASE) == set(RunPhase)


def test_every_table_entry_is_exercised_and_everything_else_is_illegal() -> None:
    hits: set[tuple[RunPhase, type[ev.Event]]] = set()
    later = [(RunPhase.REPAIRING, functools.partial(in_incident, stages)) for stages in (1, 4, 5)]
    for phase, make in (*IN_PHASE.items(), *later):
        for event in EVENTS:
            run = make()
            assert run.at(phase)
            before = run.state
            if (phase, type(event)) in m.TABLE:
                run.hits.clear()
                run.send(event)
                hits |= run.hits
            else:
                with pytest.raises(m.IllegalEvent):
                    run.send(event)
                assert run.state is before
    assert hits == set(m.TABLE)


@pytest.mark.parametrize(
    "event",
    [
        ev.Died(1.0, 9, "SIGKILL", 137),
        ev.Started(1.0, -1),
        ev.Stage(1.0, 0, 7, "stopped"),
        ev.Stage(1.0, 0, 1, "sideways"),
        ev.GateClosed(1.0, 2, 4),
        ev.Expired(1.0, "stop", 2),
        ev.Raised(1.0, 0, 5, "ValueError", 2),
        ev.Begin(1.0),
    ],
    ids=lambda e: f"{type(e).__name__}",
)
def test_an_illegal_event_changes_nothing(event: ev.Event) -> None:
    run = Driver().up()
    before = run.state
    with pytest.raises(m.IllegalEvent):
        run.send(event)
    assert run.state is before


def test_events_about_workers_that_are_gone_are_ignored() -> None:
    run = Driver().up()
    run.kill(1)
    before = run.state
    for event in (ev.Died(1.0, 1, "SIGKILL", 137), ev.Stage(1.0, 1, 2, "stopped"), ev.Raised(1.0, 1, 5, "X", 1)):
        assert run.send(event) == ()
    assert run.send(ev.Stage(1.0, 0, 1, "stopped")) == ()  # old generation
    assert run.state == before


def test_the_configuration_survives_json() -> None:
    config = m.Config(4, 2, max_restarts=1)
    assert m.Config.from_json({**config.to_json(), "more": 1}) == config
    with pytest.raises(ValueError, match="impossible"):
        m.Config(0)


# ---- start -----------------------------------------------------------------------------------------------------------


def test_begin_orders_a_fresh_world() -> None:
    run = Driver(2, 1, start_timeout=9.0)
    assert run.send(ev.Begin(0.0)) == (
        ev.ResetGate(1),
        ev.Publish(1, 0, (0, 1), (), (), fresh=True),
        ev.Spawn(0, 0),
        ev.Spawn(1, 1),
        ev.Spawn(2, None),
        ev.Deadline("start", 1, 9.0),
    )
    run.send(ev.Started(0.0, 0))
    assert run.at(RunPhase.STARTING)
    run.send(ev.Started(0.0, 1))
    assert run.at(RunPhase.RUNNING)


def test_ranks_that_do_not_start_in_time_end_the_run() -> None:
    run = Driver().begin()
    run.send(ev.Started(0.0, 0))
    actions = run.expire("start")
    assert says(actions) == ["failed"]
    assert only(actions, ev.Say).worker == 1
    assert only(actions, ev.End).code == 1


# ---- an incident -----------------------------------------------------------------------------------------------------


def test_a_whole_incident() -> None:
    run = Driver(3, 1).up()
    assert run.kill(1) == (
        ev.Fence(1),
        ev.Say("died", 1, 1, "SIGKILL"),
        ev.CloseGate(2),
        ev.Deadline("stop", 2, 10.0),
    )
    assert run.close(last=6) == (ev.Publish(2, 7, (0, 3, 2), (1,), (1,)),)
    seen = []
    for stage in STAGES:
        run.answer(stage, (0,))
        before = run.state.told
        actions = run.answer(stage, (2,)) if stage in ("stopped", "cleaned") else run.answer(stage, (2, 1))
        seen.append((before, run.state.told, run.state.phase, kinds(actions)))
    assert seen == [
        ("STOPPING", "CLEANING", RunPhase.REPAIRING, []),
        ("CLEANING", "RESETTING", RunPhase.REPAIRING, []),
        ("RESETTING", "RESETTING", RunPhase.REPAIRING, []),
        ("RESETTING", "RESTORING", RunPhase.REPAIRING, []),
        ("RESTORING", "RESUMING", RunPhase.REPAIRING, ["OpenGate"]),
        ("RESUMING", "RUNNING", RunPhase.RUNNING, ["Spawn"]),
        ("RUNNING", "RUNNING", RunPhase.RUNNING, ["Say"]),
    ]
    assert run.orders[-2:] == [ev.Spawn(4, None), ev.Say("recovered", detail="2")]


def test_stages_may_jump_and_come_before_the_decision() -> None:
    run = Driver().up()
    run.kill(1)
    run.answer("cleaned", (0,))
    assert run.at(RunPhase.STOPPING)
    run.close()
    assert run.state.told == "RESETTING"
    run.answer("first_done", (1,))
    actions = run.answer("first_done", (0,))
    assert kinds(actions) == ["OpenGate", "Spawn", "Say"]
    assert run.at(RunPhase.RUNNING)


def test_without_a_spare_the_rank_is_forked_after_publish() -> None:
    run = Driver(2, 0).up()
    run.kill(0)
    assert run.close() == (ev.Publish(2, 5, (2, 1), (0,), (0,)), ev.Spawn(2, 0))


def test_a_parked_spare_goes_before_a_started_one() -> None:
    run = Driver(2, 2).begin()
    for cell in range(4):
        run.send(ev.Started(0.0, cell))
    for cell in range(2):
        run.send(ev.Protected(0.0, cell))
    run.send(ev.Parked(0.0, 3))
    run.kill(0)
    run.kill(1)
    assert only(run.close(), ev.Publish).workers == (3, 2)


def test_two_deaths_at_once() -> None:
    run = Driver(3, 1).up()
    run.kill(0)
    assert ev.CloseGate(3) in run.kill(2)
    assert run.send(ev.GateClosed(0.0, 2, 4)) == ()
    published = only(run.close(), ev.Publish)
    assert (published.generation, published.workers, published.replaced, published.lost) == (
        3,
        (3, 1, 4),
        (0, 2),
        (0, 2),
    )
    assert run.close() == ()  # the same answer again


def test_death_of_a_replacement_keeps_the_original_memory() -> None:
    run = Driver(2, 2).up()
    run.kill(1)
    run.close()
    run.answer("reset")
    assert run.kill(2)[0] == ev.Fence(2)
    assert only(run.close(), ev.Publish) == ev.Publish(3, 5, (0, 3), (1,), (1,))
    run.answer("restored", (1,))
    run.kill(3)
    assert only(run.close(), ev.Publish).lost == (3,)


def test_a_replacement_that_lives_through_a_second_death_stays_to_be_restored() -> None:
    run = Driver(3, 2).up()
    run.kill(0)
    run.close()
    run.kill(2)
    assert only(run.close(), ev.Publish) == ev.Publish(3, 5, (3, 1, 4), (0, 2), (0, 2))


def test_a_survivor_after_its_loop_owes_no_answers() -> None:
    run = Driver().up()
    run.send(ev.LoopDone(0.0, 0))
    run.kill(1)
    run.close()
    assert run.state.told == "RESETTING"
    assert ev.OpenGate(2) in run.answer("restored", (1,))
    assert run.expire("stop") == ()


def test_a_survivor_in_its_next_loop_does() -> None:
    run = Driver().up()
    run.send(ev.LoopDone(0.0, 0))
    run.send(ev.LoopDone(0.0, 0, done=False))
    run.kill(1)
    run.close()
    assert run.state.told == "STOPPING"


# ---- deadlines -------------------------------------------------------------------------------------------------------


def test_survivors_that_do_not_stop_are_lost() -> None:
    run = Driver(3, 0).up()
    run.kill(0)
    run.answer("stopped", (1,))
    run.close()
    actions = run.expire("stop")
    assert kinds(actions) == ["Fence", "Say", "CloseGate", "Deadline"]
    assert only(actions, ev.Fence).worker == 2
    published = only(run.close(), ev.Publish)
    assert (published.replaced, published.lost) == ((0, 2), (0, 2))
    assert run.expire("stop", 2) == ()


def test_a_missing_answer_about_the_gate_is_asked_for_again() -> None:
    run = Driver().up()
    run.kill(1)
    run.answer("stopped", (0,))
    assert kinds(run.expire("stop")) == ["CloseGate", "Deadline"]
    assert run.state.generation == 2


def test_the_least_advanced_ranks_hold_up_a_recovery() -> None:
    run = Driver(3, 0).up()
    run.kill(0)
    run.close()
    run.answer("cleaned", (1, 2))
    actions = run.stall()
    assert only(actions, ev.Fence).worker == 3  # never started
    assert says(actions) == ["died"]
    run.close()
    run.answer("cleaned", (1, 2))
    run.send(ev.Started(0.0, 4))
    assert run.stall(4) == (), "all of them wait for each other, and two of them make progress"
    actions = run.stall(1, 2, 4)  # rank 0 for the second time: another worker is no help
    assert says(actions) == ["stalled_again"] and only(actions, ev.End).code == 70


def test_a_repair_that_stands_still_again_starts_the_world_anew_where_that_is_allowed() -> None:
    run = in_incident(2, max_restarts=1)
    run.stall()
    run.close()
    run.answer("cleaned", (0,))
    assert "restarting" in says(run.stall()) and run.at(RunPhase.RESTARTING)


def test_a_stall_counts_in_its_own_incident_only() -> None:
    run = in_incident(2, max_replacements=9)
    run.stall()
    run.recover()
    run.kill(run.holder(1))
    run.close()
    run.answer("cleaned", (0,))
    assert says(run.stall()) == ["died"]


def test_who_does_not_come_to_meet_the_others_is_the_one_that_holds_them_up() -> None:
    run = Driver(4, 1).up()
    run.kill(1)
    run.close()
    run.answer("stopped", (0, 2, 3))
    run.answer("cleaned", (0, 2, 3))
    run.answer("ready", (0, 1, 3))
    actions = run.stall()
    assert [a.worker for a in actions if isinstance(a, ev.Fence)] == [2]
    assert says(actions) == ["died"]


def test_where_all_want_to_meet_and_do_not_the_links_are_the_suspects_once() -> None:
    run = in_incident(2)
    run.answer("ready")
    actions = run.stall()
    assert says(actions) == ["unconnected"] and only(actions, ev.CloseGate).generation == 3
    run.close()
    for stage in STAGES[:3]:
        run.answer(stage)
    actions = run.stall()
    assert says(actions) == ["stalled_again"] and only(actions, ev.End).code == 70


def test_a_repair_may_also_stand_still_while_stopping_and_resuming() -> None:
    run = in_incident(0)
    assert only(run.stall(), ev.Fence).worker == 0
    run = in_incident(5)
    run.answer("resumed", (1,))
    assert only(run.stall(), ev.Fence).worker == 0
    assert run.send(ev.Stalled(0.0, 1, (0, 1, 2), 30.0)) == (), "of a repair that is over"
