"""Budgets limit how often something may fail before the run ends. This file orders only spares and the end.

No clock (times come in the events), no I/O, no torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ftrun.control.events import Action, Died, End, Say, Spawn, Terminate
from ftrun.control.phases import RunPhase
from ftrun.control.states import Config, Result, State, WorkerState
from ftrun.core.amounts import times
from ftrun.core.errors import EXIT_FAILED, EXIT_REQUEUE
from ftrun.core.faults import Fault

SPARE_FAILURES = 3
SERVICE_DEATHS = 5
SERVICE_WINDOW = 60.0


def finish(state: State, code: int, reason: str, *says: Say, failed: bool = True, worn_out: bool = False) -> Result:
    """End the run with exit code `code`. `failed`: see Terminate; `worn_out`: see End."""
    ending = replace(state, phase=RunPhase.ENDING, exit_code=code)
    return ending, (*says, Terminate(reason, failed), End(code, reason, worn_out))


def failure_key(death: Died) -> str:
    """Name a death that the program caused; "" for a machine fault (a signal, or nothing known)."""
    if death.signature:
        return f"died {death.signature}"
    if death.code is not None and 0 < death.code < 128:
        return f"exit {death.code}"
    return ""


def in_step(key: str, rank: int | None, step: int | None) -> str:
    """Name failure `key` of `rank` in gate step `step`. A second one there, whoever holds the rank, is the program's fault.

    In another rank or step it counts as another failure: the machine may be short of memory more than once.
    """
    return f"{key}, rank {rank}, step {step}"


def seen_before(state: State, key: str, generation: int) -> tuple[State, bool]:
    """Remember failure `key`; return True when it already occurred in an earlier generation."""
    first = next((g for k, g in state.failures if k == key), None)
    if first is None:
        return replace(state, failures=(*state.failures, (key, generation))), False
    return state, generation > first


def charge(config: Config, state: State, worker: WorkerState, death: Died) -> tuple[State, tuple[Action, ...] | None]:
    """Charge the death of a rank that needs a new worker. Actions are None while the budget lasts, else the end."""
    assert worker.rank is not None
    if death.fault in (Fault.DRAIN, Fault.GAVE_WAY, Fault.CUT_OFF):
        return state, None  # the rank did not fail; what a rank gave way to is another rank's failure, and charged to that
    key = failure_key(death)
    if key:
        state, again = seen_before(state, in_step(key, worker.rank, death.at), worker.generation)
        if again:
            what = death.signature or death.cause
            said = Say("failed_again", worker.cell, worker.rank, what)
            return finish(state, EXIT_FAILED, f"rank {worker.rank}: {what}, twice", said)
    return count_failure(config, state, worker, death.t)


def count_failure(config: Config, state: State, worker: WorkerState, t: float) -> tuple[State, tuple[Action, ...] | None]:
    """Count one more failure of a rank. Actions are None while --max-replacements allows it, else the end."""
    assert worker.rank is not None
    recent = tuple((r, at) for r, at in state.deaths if t - at <= config.replacement_window)
    state = replace(state, deaths=(*recent, (worker.rank, t)))
    count = sum(r == worker.rank for r, _ in state.deaths)
    if count > config.max_replacements:
        detail = f"{times(count)} within {config.replacement_window:g} s, where --max-replacements is {config.max_replacements}"
        said = Say("too_many_replacements", worker.cell, worker.rank, detail)
        return finish(state, EXIT_REQUEUE, f"rank {worker.rank} died too often", said, worn_out=True)
    return state, None


def charge_devices(config: Config, state: State, devices: Sequence[str], t: float) -> tuple[State, bool]:
    """Charge a fault of devices; return True when one of them had too many within the window."""
    recent = tuple((d, at) for d, at in state.device_faults if t - at <= config.replacement_window)
    state = replace(state, device_faults=(*recent, *((device, t) for device in devices)))
    return state, any(sum(d == device for d, _ in state.device_faults) > config.device_faults for device in devices)


def spare_lost(state: State, worker: WorkerState) -> tuple[State, tuple[Action, ...]]:
    """Charge a spare's death: spares that never park are not started for ever."""
    if worker.parked:
        return state, ()
    count = state.spare_failures + 1
    state = replace(state, spare_failures=count)
    if count < SPARE_FAILURES or state.spares_given_up:
        return state, ()
    return replace(state, spares_given_up=True), (Say("spares_given_up", detail=str(count)),)


def replenish(config: Config, state: State) -> Result:
    """Start missing spares, in quiet times only: a fork in the middle of an incident would slow it down."""
    if state.phase is not RunPhase.RUNNING or state.spares_given_up or any(w.finished for w in state.workers):
        return state, ()
    orders: list[Action] = []
    for _ in range(config.spares - len(state.spares())):
        state, cell = allocate(state, None)
        orders.append(Spawn(cell, None))
    return state, tuple(orders)


def allocate(state: State, rank: int | None) -> tuple[State, int]:
    """Add an incarnation in the next board cell; no cell is used twice."""
    cell = state.next_worker
    return replace(state, next_worker=cell + 1).put(WorkerState(cell, rank, state.generation)), cell


def service_lost(state: State, service: str, t: float) -> tuple[State, bool]:
    """Charge the death of one of our own processes; return True when it dies too often to go on."""
    recent = tuple((s, at) for s, at in state.service_deaths if t - at <= SERVICE_WINDOW)
    state = replace(state, service_deaths=(*recent, (service, t)))
    return state, sum(s == service for s, _ in state.service_deaths) > SERVICE_DEATHS
