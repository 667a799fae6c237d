"""Branches of the controller that no story takes: late events, limits, and answers to what nobody uses."""

from __future__ import annotations

import pytest

from ftrun.control import budgets, incidents
from ftrun.control import events as ev
from ftrun.control.machine import RunPhase
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
