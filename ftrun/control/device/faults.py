"""Answers a device's fault: asks the policy, charges the budgets, moves ranks. state.py keeps which rank has which device.

No clock, no I/O, no torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ftrun.control import budgets, incidents, policy, restarts
from ftrun.control.device import state as devices
from ftrun.control.events import CloseGate, DeviceBack, DeviceFault, DeviceOut, Devices, Probe, Probed, Say
from ftrun.control.phases import RunPhase
from ftrun.control.responses import Response
from ftrun.control.states import Config, Result, State, WorkerState
from ftrun.core.errors import EXIT_FAILED, EXIT_REQUEUE
from ftrun.core.faults import Fault

_COUNTED = (Response.REPLACE, Response.LINKS, Response.ROLL_BACK, Response.SUSPECT)


def known(config: Config, state: State, event: Devices) -> Result:
    """Take over the list of devices, once. When it comes after the first world, that world's ranks use the first ones."""
    if state.devices:
        return state, ()
    found = event.devices[: config.nproc] if state.phase is not RunPhase.NEW else ()
    device = found if len(found) == config.nproc else ()
    return replace(state, devices=event.devices, device=device, quarantine=event.quarantined), ()


def fault(config: Config, state: State, event: DeviceFault) -> Result:
    """A device failed: ask the policy, charge the budgets, act."""
    used = any(w.cell in event.workers for w in state.ranked())
    if not used and all(device in state.quarantine for device in event.devices):
        return state, ()
    verdict = policy.of_device(config.policy, event.fault, event.code, event.recovery)
    response, what = verdict.response, f"{verdict.why} on {devices.name(state, event.devices)}"
    if verdict.counts and response in _COUNTED:
        state, over = budgets.charge_devices(config, state, event.devices, event.t)
        if over:
            response, what = Response.QUARANTINE, f"{what}, more than {config.device_faults} times"
    if response is Response.SUSPECT:
        return _suspect(config, state, event, what)
    if response is Response.FAIL_NODE and not event.workers:
        response = Response.QUARANTINE  # no worker of ours uses it: the run can do without that device
    if response is Response.QUARANTINE:
        return _quarantine(config, state, event, (*event.devices, *event.siblings), what)
    if response is Response.REPORT or not event.workers:
        return state, (Say("device_reported", detail=what),)
    if response is Response.LINKS:
        return _reset_links(config, state, what)
    if response is Response.FAIL_NODE:
        return budgets.finish(state, EXIT_REQUEUE, what, Say("node_failed", detail=what), worn_out=True)
    if response is Response.STOP:
        return budgets.finish(state, EXIT_FAILED, what, Say("stopped_by_policy", detail=what))
    victims = _running(state, event.workers)
    if not victims:  # its worker is already dead, and the next one has not used the device yet
        return state, (Say("device_reported", detail=what),)
    if response is Response.ROLL_BACK:
        first = victims[0]
        return restarts.restart_or_end(config, state, event.t, Say("failed", first.cell, first.rank, what))
    if not verdict.counts and event.step is not None:
        # the application's fault: a repetition at the same step is a bug, which another worker does not mend
        first = victims[0]
        key = budgets.in_step(verdict.why, first.rank, event.step)
        state, again = budgets.seen_before(state, key, state.generation)
        if again:
            said = Say("failed_again", first.cell, first.rank, what)
            return budgets.finish(state, EXIT_FAILED, f"rank {first.rank}: {what}, twice", said)
    return incidents.lose(config, state, incidents.condemned(victims, event.t, what, event.fault, what))


def probed(config: Config, state: State, event: Probed) -> Result:
    """Restart the worker on the suspect device if the probe passed, else quarantine the device."""
    if event.device in state.quarantine:
        return state, ()
    what = f"{devices.name(state, (event.device,))} is suspect"
    if not event.ok:
        found = DeviceFault(event.t, Fault.XID.value, (event.device,), event.workers)
        return _quarantine(config, state, found, (event.device,), f"{what} and did not pass a probe ({event.detail})")
    victims = _running(state, event.workers)
    if not victims:
        return state, (Say("device_reported", detail=f"{what} and passed a probe"),)
    return incidents.lose(config, state, incidents.condemned(victims, event.t, what, Fault.XID.value, what))


def out(config: Config, state: State, event: DeviceOut) -> Result:
    """Take account of a device that somebody else quarantined."""
    if event.device not in state.devices or event.device in state.quarantine:
        return state, ()
    what = f"{devices.name(state, (event.device,))} was put in quarantine by another run ({event.reason})"
    return devices.condemn(state, (event.device,), what)


def back(config: Config, state: State, event: DeviceBack) -> Result:
    """Return a device to use."""
    if event.device not in state.quarantine:
        return state, ()
    state = replace(
        state,
        quarantine=tuple(d for d in state.quarantine if d != event.device),
        device_faults=tuple((d, t) for d, t in state.device_faults if d != event.device),
        suspects=tuple((d, t) for d, t in state.suspects if d != event.device),
    )
    said = Say("device_back", detail=devices.name(state, (event.device,)))
    if state.waiting and state.phase is RunPhase.RESTARTING:
        state, orders = restarts.go_on(config, state, event.t)
        return state, (said, *orders)
    if state.waiting:
        return state, (said, CloseGate(state.generation))  # GateClosed then gives the empty ranks their workers
    return state, (said,)


def _suspect(config: Config, state: State, event: DeviceFault, what: str) -> Result:
    recent = tuple((d, t) for d, t in state.suspects if event.t - t <= config.replacement_window)
    if any(device in event.devices for device, _ in recent):
        again = f"{what}, after its worker was started again once"
        return _quarantine(config, state, event, (*event.devices, *event.siblings), again)
    state = replace(state, suspects=(*recent, *((device, event.t) for device in event.devices)))
    return state, (Say("device_suspect", detail=what), *(Probe(device) for device in event.devices))


def _reset_links(config: Config, state: State, what: str) -> Result:
    meeting = state.phase is RunPhase.STOPPING  # all ranks are about to reconnect
    if not state.armed or meeting or any(w.finished for w in state.workers):
        return state, (Say("device_reported", detail=what),)
    state, orders = incidents.stop(config, state)
    return state, (Say("links_reset", detail=what), *orders)


def _quarantine(config: Config, state: State, event: DeviceFault, bad: Sequence[str], what: str) -> Result:
    state, orders = devices.condemn(state, bad, what)

    def hit(worker: WorkerState) -> bool:
        device = devices.of_rank(state, worker.rank)
        soon = device in bad and (worker.rank in state.replaced or state.phase is RunPhase.STARTING)
        return not worker.finished and (worker.cell in event.workers or device in event.siblings or soon)

    victims = [w for w in state.ranked() if hit(w)]
    if not victims:
        return state, orders
    state, more = incidents.lose(config, state, incidents.condemned(victims, event.t, what, event.fault, what))
    return state, (*orders, *more)


def _running(state: State, cells: Sequence[int]) -> list[WorkerState]:
    """Return the workers of `cells` that hold a rank and have used their device; a new holder without its state has not."""
    return [w for w in state.ranked() if w.cell in cells and not w.finished and w.rank not in state.replaced]
