"""Branches of the controller that no story takes: late events, limits, and answers to what nobody uses."""

from __future__ import annotations

import pytest

from ftrun.control import budgets, incidents
from ftrun.control import events as ev
from ftrun.control.machine import IllegalEvent, RunPhase
from ftrun.control.policy import Overrides
from tests.unit.driver import Driver, in_incident, kinds, only, says

A, B, C = "GPU-aaaa", "GPU-bbbb", "GPU-cccc"


def three(**options: object) -> Driver:
    """Two ranks on three devices."""
    return Driver(devices=(A, B, C), **options).up()


# ---- devices ---------------------------------------------------------------------------------------------------------


def test_devices_are_counted_once() -> None:
    run = three()
    before = run.state
    assert run.send(ev.Devices(1.0, (B, A))) == () and run.state == before


def test_a_users_row_for_a_device_starts_the_world_anew() -> None:
    run = three(policy=Overrides((("ecc", "roll-back"),)), max_restarts=1)
    [said] = [a for a in run.fault(1, 0, "ecc") if isinstance(a, ev.Say)]
    assert (said.what, said.worker, said.rank) == ("restarting", run.state.leaving[1], 1)


def test_a_probe_of_a_device_in_quarantine_is_no_news() -> None:
    run = three()
    run.fault(1, 999)
    run.send(ev.DeviceOut(0.0, B, "Xid 48"))
    assert run.send(ev.Probed(0.0, B, False, (run.holder(1),), "no answer")) == ()


def test_a_suspect_that_passes_its_probe_and_is_not_used_is_only_reported() -> None:
    run = three()
    run.fault(1, 999)
    assert says(run.send(ev.Probed(0.0, B, True))) == ["device_reported"]


def test_a_device_that_comes_back_when_nobody_waits_for_one_is_told() -> None:
    run = three()
    run.fault(1, 74)
    run.recover()
    run.fault(1, 999)
    run.fault(1, 48)
    run.recover()
    assert run.send(ev.DeviceBack(0.0, B)) == (ev.Say("device_back", detail="GPU 1 (GPU-bbbb)"),)
    assert run.state.quarantine == () and run.state.device_faults == () and run.state.suspects == ()
    assert run.send(ev.DeviceBack(0.0, B)) == ()


def test_a_device_out_of_the_run_is_no_matter() -> None:
    assert three().send(ev.DeviceOut(0.0, "GPU-other", "Xid 48")) == ()


@pytest.mark.parametrize("where", ["stopping", "unprotected", "finished"])
def test_links_are_not_reset_where_they_are_made_again_anyway_or_cannot_be(where: str) -> None:
    run = Driver(devices=(A, B, C)).up(protect=where != "unprotected")
    if where == "stopping":
        run.kill(0)
    elif where == "finished":
        run.send(ev.Finished(0.0, 0))
    assert says(run.fault(1, 74)) == ["device_reported"]


def test_links_are_reset_again_once_the_new_world_is_published() -> None:
    run = in_incident(0, nproc=2, devices=(A, B, C))
    assert says(run.fault(0, 74)) == ["links_reset"]


def test_the_budget_of_devices_is_each_devices_own() -> None:
    run = three(device_faults=1)
    assert says(run.fault(0, 74)) == ["links_reset"]
    run.recover()
    both = ev.DeviceFault(0.0, "xid", (A, C), (run.holder(0),), code=74)
    assert says(run.send(both)) == ["device_quarantined", "died"], "one of the two had too many"


# ---- workers ---------------------------------------------------------------------------------------------------------


def test_a_milestone_of_a_worker_that_is_gone_is_late() -> None:
    run = Driver().up()
    run.kill(2)
    assert run.send(ev.Parked(0.0, 2)) == ()


def test_a_worker_that_was_told_to_end_and_did_so_well_is_gone() -> None:
    run = Driver(max_restarts=1).up(protect=False)
    run.kill(0)
    assert run.send(ev.Finished(0.0, 1)) == (ev.Fence(1),)
    assert run.state.leaving == ()


def test_doubts_of_a_spare_and_of_one_that_is_gone_count_for_nothing() -> None:
    run = Driver(inexact_stops=True).up()
    assert run.send(ev.Doubted(0.0, 2, "buffers unknown")) == () and not run.state.doubted
    run.kill(1)
    run.send(ev.Doubted(0.0, 1, "buffers unknown"))
    assert not run.state.doubted


def test_the_policy_may_want_a_person_to_look_when_everybody_waits() -> None:
    run = Driver(policy=Overrides((("link", "stop"),))).up()
    actions = run.send(ev.Stuck(0.0, 5, 1, "allreduce", "link"))
    assert says(actions) == ["stopped_by_policy"] and only(actions, ev.End).reason == "every rank waits in allreduce"


def test_which_survivors_are_in_their_script() -> None:
    run = in_incident(0)
    assert [incidents.in_its_script(run.state, w) for w in run.state.ranked()] == [True, False]
    run.answer("cleaned", (0,))
    assert not any(incidents.in_its_script(run.state, w) for w in run.state.ranked())
    run.answer("restored")
    assert all(incidents.in_its_script(run.state, w) for w in run.state.ranked())


def test_a_deadline_of_a_restart_that_is_not_known_changes_nothing() -> None:
    run = Driver(max_restarts=1).up(protect=False)
    run.kill(0)
    before = run.state
    assert run.expire("stop") == () and run.state == before
    assert run.expire("leave") == (ev.Fence(1),) and run.state.leaving == ()


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "key"), [(None, ""), (0, ""), (1, "exit 1"), (127, "exit 127"), (128, ""), (137, "")])
def test_which_ends_are_the_programs_own(code: int | None, key: str) -> None:
    assert budgets.failure_key(ev.Died(0.0, 0, "x", code)) == key
    assert budgets.failure_key(ev.Died(0.0, 0, "x", code, signature="E at a.py:1")) == "died E at a.py:1"


@pytest.mark.parametrize(("passed", "ends"), [(100.0, True), (100.1, False)])
def test_a_death_counts_to_the_end_of_its_window(passed: float, ends: bool) -> None:
    run = Driver(2, 0, max_replacements=1, replacement_window=100.0).up()
    run.t = 5.0
    run.kill(0)
    run.recover()
    run.t += passed
    assert ("too_many_replacements" in says(run.kill(run.holder(0)))) == ends


@pytest.mark.parametrize(("passed", "ends"), [(100.0, True), (100.1, False)])
def test_a_fault_of_a_device_counts_to_the_end_of_its_window(passed: float, ends: bool) -> None:
    run = three(device_faults=1, replacement_window=100.0)
    run.t = 5.0
    run.fault(1, 74)
    run.recover()
    run.t += passed
    assert ("device_quarantined" in says(run.fault(1, 74))) == ends


@pytest.mark.parametrize(("passed", "ends"), [(60.0, True), (60.1, False)])
def test_a_death_of_a_service_counts_to_the_end_of_its_window(passed: float, ends: bool) -> None:
    run = Driver().up()
    run.t = 5.0
    for _ in range(5):
        run.send(ev.ServiceDied(run.t, "fd store"))
    run.t += passed
    assert ("End" in kinds(run.send(ev.ServiceDied(run.t, "fd store")))) == ends


def test_a_failure_seen_twice_in_one_generation_is_one() -> None:
    state, again = budgets.seen_before(Driver().up().state, "exit 1", 3)
    assert not again
    assert [budgets.seen_before(state, "exit 1", generation)[1] for generation in (3, 4)] == [False, True]


def test_what_ends_the_run_is_told_by_its_signature_else_its_cause() -> None:
    for facts, what in (({"signature": "E at a.py:1"}, "E at a.py:1"), ({}, "exit 3")):
        run = Driver(2, 0).up()
        for _ in range(2):
            actions = run.kill(run.holder(0), code=3, cause="exit 3", **facts)
            if not run.at(RunPhase.ENDING):
                run.recover()
        assert only(actions, ev.End).reason == f"rank 0: {what}, twice"
        assert [a.detail for a in actions if isinstance(a, ev.Say)] == [what, what]


# ---- what a policy, a place or a word may change ---------------------------------------------------------------------


def told(actions: tuple[ev.Action, ...]) -> list[tuple[str, int | None, int | None, str]]:
    return [(a.what, a.worker, a.rank, a.detail) for a in actions if isinstance(a, ev.Say)]


def test_what_a_person_reads_of_an_end_that_the_policy_wants() -> None:
    run = Driver(policy=Overrides((("exception", "stop"), ("frozen", "quarantine")))).up()
    assert says(run.kill(0, fault="frozen")) == ["died"], "without devices there is none to give up"
    run.recover()
    actions = run.kill(run.holder(0), signature="E at a.py:1", cause="exit 1", fault="exception")
    assert told(actions)[1] == ("stopped_by_policy", 2, 0, "rank 0: E at a.py:1")


def test_a_death_gives_up_no_device() -> None:
    assert says(three().kill(1)) == ["died"]


def test_what_a_person_reads_of_an_exception_after_the_update() -> None:
    actions = Driver(2, 0).up().kill(0, signature="E at a.py:1", fault="exception", outside="after the update")
    assert told(actions)[1] == ("failed", 0, 0, "E at a.py:1, after the update")


def test_a_death_in_the_first_step_is_repaired_in_it() -> None:
    run = Driver().up()
    run.kill(1)
    assert only(run.close(-1), ev.Publish).resume == 0


def test_everybody_goes_back_to_a_snapshot_of_step_0_once() -> None:
    run = in_incident(2)
    cell, generation = run.holder(1), run.state.generation
    actions = run.send(ev.Unrestorable(0.0, cell, generation, "no replica", 0))
    assert says(actions) == ["rolling_back"] and run.state.rollback == 0
    publish = only(run.close(7), ev.Publish)
    assert (publish.resume, publish.rollback) == (0, True)
    assert run.send(ev.Unrestorable(0.0, cell, generation, "no replica", 0)) == (), "of the world before"
    assert says(run.send(ev.Unrestorable(0.0, cell, run.state.generation, "no replica", 0))) == ["unrestorable"]


def test_nobody_is_waited_for_where_nothing_is_owed() -> None:
    run = Driver().up()
    assert incidents.awaited(run.state) == []
    run.kill(1)
    assert incidents.awaited(run.state) == [], "the gate's answer comes first"
    run.recover()
    assert incidents.awaited(run.state) == []


def test_a_recovery_is_told_once() -> None:
    run = Driver().up()
    run.kill(1)
    run.recover()
    assert run.send(ev.LoopDone(0.0, run.holder(0))) == ()


def tail(**options: object) -> Driver:
    """Two ranks past their loop, of which rank 1 died there."""
    run = Driver(**options).up()
    for rank in range(2):
        run.send(ev.LoopDone(0.0, run.holder(rank)))
    run.kill(1, loop_done=True)
    return run


def test_a_doubt_in_a_repair_after_the_loop_ends_the_run_at_once() -> None:
    assert says(tail(inexact_stops=True).send(ev.Doubted(0.0, 0, "1 not kept"))) == ["inexact"]


def test_a_rank_that_has_finished_does_not_turn_a_death_after_the_loop_into_a_stop() -> None:
    run = Driver().up()
    run.send(ev.Finished(0.0, 0))
    run.send(ev.LoopDone(0.0, 1))
    assert only(run.kill(1, loop_done=True), ev.Publish).tail


def test_a_death_after_the_loop_in_an_incident_begins_it_again() -> None:
    run = Driver().up()
    run.send(ev.LoopDone(0.0, 1))
    run.kill(0)
    assert kinds(run.kill(1, loop_done=True))[-2:] == ["CloseGate", "Deadline"]


@pytest.mark.parametrize("finished", [False, True])
def test_two_deaths_of_which_one_is_after_the_loop(finished: bool) -> None:
    run = Driver(3, devices=(A, B, C, "GPU-dddd", "GPU-eeee"), max_restarts=1).up()
    run.send(ev.LoopDone(0.0, 0))
    run.send(ev.Finished(0.0, 2) if finished else ev.LoopDone(0.0, 2))
    actions = run.send(ev.DeviceFault(0.0, "xid", (A,), (0,), (B,), 95))
    assert ("restarting" in says(actions)) == finished and ("CloseGate" in kinds(actions)) != finished


def test_a_process_that_begins_to_die_and_never_ends_is_lost_with_those_that_do_not_stop() -> None:
    run = Driver(3, 0).up()
    run.send(ev.Dying(0.0, 0))
    actions = run.expire("stop")
    assert [a.worker for a in actions if isinstance(a, ev.Fence)] == [0, 1, 2]
    assert only(actions, ev.CloseGate).generation == 3


def test_a_body_that_raises_while_the_others_resume_begins_the_incident_again() -> None:
    run = in_incident(5)
    assert [w.generation for w in run.state.ranked()] == [1, 2], "the replacement was in no world before"
    run.answer("resumed", (0,))
    assert run.at(RunPhase.REPAIRING) and [w.generation for w in run.state.ranked()] == [2, 2]
    assert kinds(run.send(ev.Raised(0.0, 0, 5, "ValueError", 2))) == ["Say", "CloseGate", "Deadline"]
    assert run.send(ev.Raised(0.0, 0, 5, "ValueError", 2)) == (), "told twice"


def test_whoever_left_its_loop_before_a_repair_is_of_its_generation_too() -> None:
    run = Driver(3, 1).up()
    run.send(ev.LoopDone(0.0, 0))
    run.kill(1)
    run.close()
    for stage in ("stopped", "cleaned", "reset", "restored", "resumed"):
        run.answer(stage, (1, 2))
    assert run.at(RunPhase.RUNNING) and [w.generation for w in run.state.ranked()] == [2, 2, 2]


def test_what_a_person_reads_of_an_error_of_ours() -> None:
    actions = Driver().up().kill(0, signature="UsageError at a.py:1", final=2)
    assert told(actions)[1] == ("failed", 0, 0, "UsageError at a.py:1")
    assert only(actions, ev.End) == ev.End(2, "rank 0: UsageError at a.py:1")


def test_a_rank_alone_has_no_links_to_suspect() -> None:
    run = Driver(1, 1).up()
    run.kill(0)
    run.close()
    run.answer("ready")
    assert told(run.stall()) == [("died", 1, 0, "held the repair up: no progress for 30 s at train.py:7")]


def test_of_survivors_and_a_replacement_that_make_no_progress_the_replacement_goes() -> None:
    run = in_incident(2)
    new = run.holder(1)
    assert only(run.stall(), ev.Fence).worker == new


def test_all_that_want_to_meet_are_told_by_the_first() -> None:
    run = in_incident(2)
    run.answer("ready")
    assert told(run.stall())[0] == ("unconnected", 0, 0, "held the repair up: no progress for 30 s at train.py:7")


def test_what_is_said_of_one_that_must_not_live() -> None:
    worker = Driver().up().state.workers[0]
    assert [d.evidence for d in incidents.condemned([worker], 0.0, "did not stop")] == ["it did not stop"]
    assert [d.evidence for d in incidents.condemned([worker], 0.0, "did not stop", evidence="seen")] == ["seen"]


def test_a_world_of_which_one_has_finished_is_not_stopped_when_the_others_wait() -> None:
    run = Driver(3, 0).up()
    run.send(ev.Finished(0.0, 0))
    assert run.send(ev.Stuck(0.0, 5, 1, "allreduce")) == ()


# ---- beginnings and ends of processes --------------------------------------------------------------------------------


def test_a_worker_that_is_still_to_be_started_is_no_worker() -> None:
    run = Driver(2, 0).up()
    with pytest.raises(IllegalEvent):
        run.send(ev.Started(0.0, 2))


@pytest.mark.parametrize("who", ["spare", "past its loop", "twice", "unprotected", "beside one that finished"])
def test_a_beginning_death_that_stops_nobody(who: str) -> None:
    run = Driver(3, 1).up(protect=who != "unprotected")
    if who == "past its loop":
        run.send(ev.LoopDone(0.0, 0))
    elif who == "twice":
        run.send(ev.Dying(0.0, 0))
    elif who == "beside one that finished":
        run.send(ev.Finished(0.0, 1))
    before = run.state
    assert run.send(ev.Dying(0.0, 3 if who == "spare" else 0)) == () and run.state == before


@pytest.mark.parametrize("first", [0, 1])
def test_a_script_that_ends_before_its_start_was_seen_has_started(first: int) -> None:
    run = Driver(2, 0).begin()
    for cell in (first, 1 - first):
        run.send(ev.Finished(0.0, cell) if cell else ev.Started(0.0, cell))
    assert run.at(RunPhase.RUNNING)


def test_a_run_of_which_one_rank_is_not_protected_is_not_repaired_in_place() -> None:
    run = Driver(2, 0).up(protect=False)
    run.send(ev.Protected(0.0, 0))
    assert not run.state.armed and says(run.kill(0)) == ["died", "failed"]


def test_a_start_deadline_of_another_world_or_another_name_changes_nothing() -> None:
    run = Driver(2, 0).begin()
    for actions in (run.expire("stop"), run.expire("start", 0)):
        assert actions == () and run.at(RunPhase.STARTING)


# ---- restarts --------------------------------------------------------------------------------------------------------


def again(run: Driver) -> None:
    """The old world ends, the store answers, the pause is over."""
    run.leave()
    run.send(ev.ServiceReady(run.t, "store"))
    if run.at(RunPhase.RESTARTING):
        run.expire("backoff")
    assert run.at(RunPhase.STARTING)
    run.raise_world(protect=False)


def test_as_many_restarts_as_were_asked_for() -> None:
    run = Driver(2, 0, max_restarts=2).up(protect=False)
    for wanted in ("restarting", "restarting", "failed"):
        assert says(run.kill(run.holder(0))) == ["died", wanted]
        if wanted == "restarting":
            again(run)


def test_pauses_grow_to_half_a_minute_and_begin_anew_after_an_attempt_that_came_to_something() -> None:
    run = Driver(2, 0, max_restarts=99)
    run.t = 1000.0  # a clock begins anywhere
    run.up(protect=False)
    pauses = []
    for attempt in range(13):
        if attempt == 10:
            run.t += 60.0
        pauses.append(sum(a.seconds for a in run.kill(run.holder(0)) if isinstance(a, ev.Deadline) and a.name == "backoff"))
        again(run)
    assert pauses == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30, 0, 0, 0.5]


def test_nothing_of_the_attempt_before_is_left() -> None:
    run = Driver(max_restarts=1).up()
    run.send(ev.Stepped(0.0, 0))
    run.send(ev.Doubted(0.0, 0, "1 not kept"))
    run.kill(1)
    run.recover()
    run.kill(run.holder(0), fault="exception", signature="E", outside="after the update")
    state = run.state
    left = (state.stepped, state.opened, state.recovering, state.repaired, state.doubted, state.store_ready)
    assert run.at(RunPhase.RESTARTING) and not any(left)


def test_a_store_that_dies_after_its_answer_is_waited_for_again() -> None:
    run = Driver(max_restarts=1).up(protect=False)
    run.kill(0)
    run.send(ev.ServiceReady(0.0, "store"))
    run.send(ev.ServiceDied(0.0, "store"))
    run.leave()
    assert run.at(RunPhase.RESTARTING)
    run.send(ev.ServiceReady(0.0, "store"))
    assert run.at(RunPhase.STARTING)


def test_a_start_that_the_store_spoiled_late_is_not_put_down_to_it() -> None:
    for seconds, wanted in ((59.9, "restarting"), (60.0, "failed")):
        run = Driver()
        run.t = 1000.0
        run.begin()
        run.raise_world(protect=False)
        run.send(ev.ServiceDied(run.t, "store"))
        run.send(ev.ServiceReady(run.t, "store"))
        run.t += seconds
        assert says(run.kill(0, code=1, cause="exit 1")) == ["died", wanted]


# ---- more of devices -------------------------------------------------------------------------------------------------


def test_a_new_holder_on_a_bad_device_goes_and_one_on_a_good_device_stays() -> None:
    run = Driver(devices=(A, B, C, "GPU-dddd")).up()
    run.kill(1)
    run.close()
    assert says(run.send(ev.DeviceFault(0.0, "ecc", (C,)))) == ["device_quarantined"]
    assert says(run.send(ev.DeviceFault(0.0, "ecc", (B,)))) == ["device_quarantined", "died"]


def test_a_rank_that_starts_on_a_bad_device_goes() -> None:
    run = Driver(devices=(A, B, C), max_restarts=1).begin()
    assert says(run.send(ev.DeviceFault(0.0, "ecc", (B,)))) == ["device_quarantined", "died", "restarting"]


def test_a_fault_of_two_devices_of_which_one_is_in_quarantine_is_news() -> None:
    run = three()
    run.send(ev.DeviceOut(0.0, C, "Xid 48"))
    assert says(run.send(ev.DeviceFault(0.0, "ecc", (B, C)))) == ["device_quarantined"]


def test_a_fault_of_a_device_in_quarantine_that_nobody_uses_is_no_news() -> None:
    run = three()
    run.fault(1, 48)
    run.recover()
    assert run.send(ev.DeviceFault(0.0, "xid", (B,), code=74)) == ()


@pytest.mark.parametrize("step", [None, 5])
def test_a_fault_that_is_the_devices_may_come_twice_in_a_step(step: int | None) -> None:
    run = three(policy=Overrides((("ecc", "replace"),)))
    for _ in range(2):
        assert says(run.fault(1, 0, "ecc", step=step)) == ["died"]
        run.recover()


def test_an_application_fault_is_not_charged_to_the_device() -> None:
    run = three(device_faults=0)
    assert says(run.fault(1, 13)) == ["died"] and run.state.device_faults == ()


@pytest.mark.parametrize(("passed", "wanted"), [(100.0, "device_quarantined"), (100.1, "device_suspect")])
def test_suspicion_counts_to_the_end_of_its_window(passed: float, wanted: str) -> None:
    run = three(replacement_window=100.0)
    run.t = 5.0
    run.fault(1, 999)
    run.t += passed
    assert wanted in says(run.fault(1, 999))


def test_that_a_device_is_waited_for_before_the_first_world_is_told() -> None:
    run = Driver(devices=(A, B), quarantined=(A,), wait_for_device=True).begin()
    assert says(tuple(run.orders)) == ["device_waited_for"]


def test_how_devices_are_called() -> None:
    run = Driver(1, devices=("MIG-aaaa-bbbb-cccc", "MIG-dddd")).up()
    assert told(run.fault(0, 48))[0][3].endswith(" on MIG device 0 (MIG-aaaa-bbb)")


def test_what_is_seen_of_fewer_devices_than_ranks() -> None:
    run = Driver(3, 0, devices=(A, B)).up()
    assert only(tuple(run.orders), ev.Publish).devices == ()


def test_what_was_decided_about_a_device_is_not_asked_again_about_its_worker() -> None:
    run = three(policy=Overrides((("ecc", "roll-back"),)), max_restarts=1, device_faults=0)
    assert says(run.fault(1, 0, "ecc")) == ["device_quarantined", "died"], "one too many: no longer the user's row"


def test_which_devices_are_missing() -> None:
    run = Driver(devices=(A, B), quarantined=(A,)).begin()
    assert told(tuple(run.orders)) == [("devices_exhausted", None, None, "GPU 0 (GPU-aaaa)")]
