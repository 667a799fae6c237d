"""Faults of devices in the controller: who is replaced, which device is given up, which takes its place, how it ends."""

from __future__ import annotations

import pytest

from ftrun.control import events as ev
from ftrun.control import machine as m
from ftrun.control.machine import RunPhase
from ftrun.control.policy import Overrides
from ftrun.control.replay import replay
from tests.unit.driver import Driver, kinds, only, says

A, B, C, D = "GPU-aaaa", "GPU-bbbb", "GPU-cccc", "GPU-dddd"


def three() -> Driver:
    """Two ranks on three devices."""
    return Driver(devices=(A, B, C)).up()


def test_each_rank_has_its_device_and_sees_what_the_launcher_sees() -> None:
    run = three()
    assert run.state.device == (A, B)
    assert only(tuple(run.orders), ev.Publish).devices == ()


def test_devices_that_are_counted_late() -> None:
    """The launcher does not wait for the driver unless something is in quarantine."""
    run = Driver(2, 1).up()
    run.send(ev.Devices(1.0, (A, B, C)))
    assert run.state.device == (A, B)
    run.fault(1, 48)
    assert only(run.close(), ev.Publish).devices == (A, C)
    few = Driver(2, 1).up()
    few.send(ev.Devices(1.0, (A,)))
    assert few.state.device == ()


def test_an_application_xid_replaces_the_worker_on_the_same_device() -> None:
    run = three()
    assert says(run.fault(1, 13)) == ["died"]
    run.recover()
    assert run.state.device == (A, B)
    assert run.state.quarantine == ()
    assert replay(run.journal) == []


def test_a_gpu_that_needs_a_reset_is_quarantined_and_the_spare_device_used() -> None:
    run = three()
    actions = run.fault(1, 48)
    assert kinds(actions)[:3] == ["Say", "Quarantine", "Fence"]
    assert only(actions, ev.Quarantine).device == B
    assert says(actions) == ["device_quarantined", "died"]
    publish = only(run.close(), ev.Publish)
    assert publish.devices == (A, C)
    assert run.fault(0, 48) and run.state.quarantine == (B, A)
    assert replay(run.journal) == []


@pytest.mark.parametrize(("fault", "recovery"), [("gpu-lost", -1), ("ecc", 0), ("xid", 1)])
def test_lost_gpu_ecc_and_the_drivers_wish(fault: str, recovery: int) -> None:
    run = three()
    run.fault(0, 13, fault, recovery=recovery)
    assert run.state.quarantine == (A,)
    run.recover()
    assert run.state.device == (C, B)


def test_no_healthy_device_left_ends_the_run_for_another_machine() -> None:
    run = Driver(devices=(A, B)).up()
    run.fault(1, 48)
    actions = run.close()
    assert says(actions) == ["devices_exhausted"]
    assert only(actions, ev.End).code == 75


def test_waiting_for_a_device() -> None:
    run = Driver(devices=(A, B), wait_for_device=True).up()
    run.fault(1, 48)
    assert says(run.close()) == ["device_waited_for"]
    assert run.state.waiting
    run.answer("stopped", (0,))
    assert "CloseGate" in kinds(run.expire("stop"))  # nobody is condemned for waiting
    assert run.close() == ()
    assert kinds(run.send(ev.DeviceBack(run.t, B))) == ["Say", "CloseGate"]
    run.recover()
    assert not run.state.waiting
    assert run.state.device == (A, B)


def test_waiting_before_the_first_world() -> None:
    run = Driver(devices=(A, B), quarantined=(A,), wait_for_device=True).begin()
    assert run.at(RunPhase.RESTARTING) and run.state.waiting
    actions = run.send(ev.DeviceBack(run.t, A))
    assert only(actions, ev.Publish).workers == (0, 1)
    run.raise_world()
    assert run.at(RunPhase.RUNNING) and run.state.armed


def test_a_device_that_was_in_quarantine_before_is_not_given_out() -> None:
    run = Driver(devices=(A, B, C), quarantined=(A,)).up()
    assert run.state.device == (B, C)
    assert only(tuple(run.orders), ev.Publish).devices == (B, C)
    end = Driver(devices=(A, B), quarantined=(A,)).begin()
    assert only(tuple(end.orders), ev.End).code == 75


def test_fewer_devices_than_ranks_are_shared_and_a_bad_one_hidden() -> None:
    run = Driver(3, 0, devices=(A, B)).up()
    assert run.state.device == ()
    run.send(ev.DeviceFault(0.0, "xid", (A,), (0, 2), code=48))
    publish = only(run.close(), ev.Publish)
    assert (publish.devices, publish.replaced) == ((B,), (0, 2))


def test_an_unknown_xid_probe_one_restart_then_quarantine() -> None:
    run = three()
    actions = run.fault(1, 999)
    assert says(actions) == ["device_suspect"] and only(actions, ev.Probe).device == B
    assert says(run.send(ev.Probed(0.0, B, True, (run.holder(1),)))) == ["died"]
    run.recover()
    assert run.state.device == (A, B)
    assert says(run.fault(1, 998)) == ["device_quarantined", "died"]
    run.recover()
    assert run.state.device == (A, C)


def test_a_suspect_that_fails_the_probe_goes_at_once() -> None:
    run = three()
    run.fault(1, 999)
    assert says(run.send(ev.Probed(0.0, B, False, (run.holder(1),), "no answer"))) == ["device_quarantined", "died"]


def test_suspicion_ends_with_the_window() -> None:
    run = three()
    run.fault(1, 999)
    run.t = 4000.0
    assert says(run.fault(1, 999)) == ["device_suspect"]


def test_nvlink_resets_the_connections_counts_then_quarantines() -> None:
    run = three()
    for _ in range(3):
        actions = run.fault(1, 74)
        assert says(actions) == ["links_reset"] and not [a for a in actions if isinstance(a, ev.Fence)]
        run.recover()
    assert says(run.fault(1, 74)) == ["device_quarantined", "died"]


def test_the_device_budget_has_a_window() -> None:
    run = three()
    for _ in range(6):
        assert says(run.fault(1, 74)) == ["links_reset"]
        run.recover()
        run.t += 2000.0


def test_the_machine_fails() -> None:
    run = three()
    actions = run.fault(1, 79)
    assert says(actions) == ["node_failed"] and only(actions, ev.End).code == 75
    unused = three()
    assert says(unused.send(ev.DeviceFault(0.0, "xid", (C,), code=79))) == ["device_quarantined"]
    assert unused.at(RunPhase.RUNNING)


def test_a_device_that_another_run_gave_up_is_given_to_nobody() -> None:
    run = three()
    out = ev.DeviceOut(0.0, C, "Xid 48")
    assert says(run.send(out)) == ["device_quarantined"] and run.send(out) == ()
    run.fault(1, 48)
    assert says(run.close()) == ["devices_exhausted"]
    mine = three()
    assert says(mine.send(ev.DeviceOut(0.0, B, "Xid 48"))) == ["device_quarantined"]  # who has it keeps it
    assert mine.at(RunPhase.RUNNING)
    assert says(mine.fault(1, 48)) == ["died"]  # until it fails here too


@pytest.mark.parametrize("code", [43, 45, 63, 154])
def test_what_is_only_reported(code: int) -> None:
    run = three()
    assert says(run.fault(1, code)) == ["device_reported"]
    assert run.at(RunPhase.RUNNING)


def test_a_device_of_ours_that_nobody_uses_kills_nobody() -> None:
    run = three()
    assert says(run.send(ev.DeviceFault(0.0, "xid", (B,), code=13))) == ["device_reported"]
    assert says(run.send(ev.DeviceFault(0.0, "xid", (B,), code=48))) == ["device_quarantined"]
    assert run.at(RunPhase.RUNNING)


def test_an_xid_after_its_workers_death_does_not_strike_the_replacement() -> None:
    run = three()
    run.kill(1)
    run.close()
    assert says(run.fault(1, 31)) == ["device_reported"]
    # but a device that is bad is not for the replacement either
    assert says(run.fault(1, 48)) == ["device_quarantined", "died"]


def test_the_same_application_xid_at_the_same_step_is_the_programs() -> None:
    run = three()
    run.fault(1, 31, step=5)
    run.recover()
    assert "failed_again" not in says(run.fault(0, 31, step=5))
    run.recover()
    actions = run.fault(1, 31, step=5)
    assert says(actions) == ["failed_again"] and only(actions, ev.End).code == 1


def test_a_reset_hits_every_instance_of_a_mig_device() -> None:
    run = three()
    actions = run.send(ev.DeviceFault(0.0, "xid", (A,), (0,), (B,), 95))
    assert [a.device for a in actions if isinstance(a, ev.Quarantine)] == [A, B]
    assert says(actions) == ["device_quarantined", "died", "died"]
    actions = three().send(ev.DeviceFault(0.0, "xid", (A,), (0,), (B,), 13))
    assert says(actions) == ["died"]


def test_a_fault_of_a_device_in_quarantine_is_no_news() -> None:
    run = three()
    run.fault(1, 48)
    assert run.send(ev.DeviceFault(0.0, "xid", (B,), (1,), code=48)) == ()


@pytest.mark.parametrize(
    ("fault", "response", "wanted"),
    [
        ("signal", "stop", ["died", "stopped_by_policy"]),
        ("frozen", "quarantine", ["died", "device_quarantined"]),
        ("signal", "roll-back", ["died", "restarting"]),
    ],
)
def test_a_users_row_for_a_worker(fault: str, response: str, wanted: list[str]) -> None:
    run = Driver(devices=(A, B, C), policy=Overrides(((fault, response),)), max_restarts=1).up()
    assert says(run.kill(1, fault=fault)) == wanted
    assert replay(run.journal) == []


def test_a_users_row_for_an_exception() -> None:
    def run(response: str) -> Driver:
        return Driver(policy=Overrides((("exception", response),)), max_restarts=1).up()

    event = ev.Raised(0.0, 1, 5, "ValueError", 1)
    assert says(run("stop").send(event)) == ["stopped_by_policy"]
    assert says(run("replace").send(event)) == ["died"]
    assert says(run("roll-back").send(event)) == ["restarting"]


def test_users_rows_for_what_is_only_reported_or_tried_again() -> None:
    slow = ev.Noticed(0.0, 1, "straggler", "three times as slow")
    assert says(three().send(slow)) == ["noticed"]
    mine = Overrides((("straggler", "quarantine"), ("disk-full", "stop"), ("nonfinite", "quarantine")))
    assert says(Driver(devices=(A, B, C), policy=mine).up().send(slow)) == ["died", "device_quarantined"]
    full = Driver(policy=mine).up().send(ev.Noticed(0.0, None, "disk-full", "no room"))
    assert says(full) == ["stopped_by_policy"] and only(full, ev.End).code == 1
    bad = ev.Raised(0.0, 1, 5, "not finite", 1, "nonfinite", "the gradient of layer 3")
    assert says(three().send(bad)) == ["raised"]
    assert says(Driver(devices=(A, B, C), policy=mine).up().send(bad)) == ["died", "device_quarantined"]


def test_a_users_row_for_an_xid() -> None:
    run = Driver(devices=(A, B, C), policy=Overrides((), ((79, "quarantine"), (48, "stop")))).up()
    assert says(run.fault(1, 79)) == ["device_quarantined", "died"]
    run.recover()
    assert only(run.fault(0, 48), ev.End).code == 1


def test_the_configuration_survives_the_journal() -> None:
    config = m.Config(2, policy=Overrides((("exit", "stop"),), ((79, "report"),)), wait_for_device=True)
    import json

    assert m.Config.from_json(json.loads(json.dumps(config.to_json()))) == config
