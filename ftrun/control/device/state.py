"""Keeps which rank has which device, and which devices are in quarantine.

With at least as many devices as ranks each rank has one of its own, and the others are spare devices. With fewer the
ranks share them as the script likes, and a device in quarantine is only kept out of their sight. Without any (a CPU run)
nothing here does anything. No clock, no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ftrun.control import budgets
from ftrun.control.events import Action, Quarantine, Say
from ftrun.control.states import Config, Result, State
from ftrun.core.errors import EXIT_REQUEUE


def name(state: State, devices: Sequence[str]) -> str:
    """`GPU 2 (GPU-5c1f0e2a)`: the place among the run's devices, and as much of the UUID as tells them apart."""

    def one(device: str) -> str:
        place = f" {state.devices.index(device)}" if device in state.devices else ""
        kind = "MIG device" if device.startswith("MIG") else "GPU"
        return f"{kind}{place} ({device[:12]})"

    return ", ".join(one(device) for device in devices)


def healthy(state: State) -> tuple[str, ...]:
    """Return the devices that are not in quarantine."""
    return tuple(d for d in state.devices if d not in state.quarantine)


def short(config: Config, state: State) -> bool:
    """Are there too few healthy devices for every rank?"""
    if not state.devices:
        return False
    return len(healthy(state)) < (config.nproc if len(state.devices) >= config.nproc else 1)


def assign(config: Config, state: State) -> State:
    """Give each rank without a healthy device of its own another one. There must be enough: see `short`."""
    if len(state.devices) < config.nproc:
        return state
    good = healthy(state)
    kept = [device if device in good else "" for device in state.device or ("",) * config.nproc]
    free = [device for device in good if device not in kept]
    return replace(state, device=tuple(device or free.pop(0) for device in kept))


def visible(config: Config, state: State) -> tuple[str, ...]:
    """Return the devices that workers may see, in the order of LOCAL_RANK; () = those that the launcher sees."""
    if not state.device:
        return healthy(state) if any(d in state.quarantine for d in state.devices) else ()
    return () if state.device == state.devices[: config.nproc] else state.device


def without(config: Config, state: State) -> Result:
    """Wait for a device, or end, when there are too few healthy ones."""
    bad = ", ".join(name(state, (device,)) for device in state.devices if device in state.quarantine)
    if config.wait_for_device:
        told = () if state.waiting else (Say("device_waited_for", detail=bad),)
        return replace(state, waiting=True), told
    said = Say("devices_exhausted", detail=bad)
    return budgets.finish(state, EXIT_REQUEUE, "no healthy device is left", said, worn_out=True)


def of_rank(state: State, rank: int | None) -> str:
    return state.device[rank] if rank is not None and rank < len(state.device) else ""


def condemn(state: State, devices: Sequence[str], what: str) -> tuple[State, tuple[Action, ...]]:
    """Quarantine devices; no actions for those that are in quarantine already."""
    fresh = tuple(d for d in devices if d not in state.quarantine)
    said = (Say("device_quarantined", detail=what),) if fresh else ()
    state = replace(state, quarantine=(*state.quarantine, *fresh))
    return state, (*said, *(Quarantine(device, what) for device in fresh))
