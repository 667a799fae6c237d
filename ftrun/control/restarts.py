"""Starts and restarts the whole world: when nothing can be recovered in place, everyone runs the script anew.

No clock, no I/O, no torch here.
"""

from __future__ import annotations

from dataclasses import replace

from ftrun.control.budgets import allocate, failure_key, finish, seen_before
from ftrun.control.device import state as devices
from ftrun.control.events import (
    Action,
    Deadline,
    Died,
    Dismiss,
    Expired,
    Fence,
    PeerFailed,
    Publish,
    ResetGate,
    Say,
    Spawn,
    StartService,
)
from ftrun.control.phases import RunPhase
from ftrun.control.states import Config, Result, State
from ftrun.core.errors import EXIT_FAILED

BACKOFF_FIRST = 0.5
BACKOFF_MOST = 30.0
# The failure of an attempt that lasted this long is no failure of the start.
EARLY = 60.0


def open_world(config: Config, state: State, t: float) -> Result:
    """Order a fresh world of `state.generation`: every rank is forked."""
    if devices.short(config, state):
        return devices.without(config, replace(state, phase=RunPhase.RESTARTING))
    state = devices.assign(config, replace(state, waiting=False))
    holder: list[int | None] = []
    spawns: list[Action] = []
    for rank in range(config.nproc):
        state, cell = allocate(state, rank)
        holder.append(cell)
        spawns.append(Spawn(cell, rank))
    state = replace(
        state,
        phase=RunPhase.STARTING,
        holder=tuple(holder),
        lost=(None,) * config.nproc,
        protected=(False,) * config.nproc,
        attempt_since=t,
        store_lost=False,
        reconnected=False,
        stood_still=(),
    )
    publish = Publish(
        generation=state.generation,
        resume=0,
        workers=tuple(c for c in holder if c is not None),
        replaced=(),
        lost=(),
        fresh=True,
        attempt=state.attempt,
        devices=devices.visible(config, state),
    )
    deadline = Deadline("start", state.generation, config.start_timeout)
    return state, (ResetGate(state.generation), publish, *spawns, deadline)


def restart_or_end(
    config: Config, state: State, t: float, said: Say, *, failure: str = "", full: bool = True, code: int = EXIT_FAILED
) -> Result:
    """Restart the world if that is still allowed, else end with exit code `code` and `said` as the root cause.

    `said` names worker, rank and cause. `failure` names a failure of the program (see `failure_key`): its repetition
    spends no start-up restart. `full` = start-up restarts may be spent too, not only --max-restarts. Nobody asked for
    those, so they are spent only while no optimizer took a step and nothing is lost. One of several nodes only stops
    its workers: all nodes decide together how to go on.
    """
    if config.shared:
        return _restart(config, state, t, replace(said, what="world_stopped"))
    shaken = state.store_lost and t - state.attempt_since < EARLY
    recoverable = shaken or any(w.grouped for w in state.workers)
    if state.restarts < config.max_restarts:
        state = replace(state, restarts=state.restarts + 1)
    elif full and recoverable and not state.stepped and state.startup_restarts < config.max_replacements:
        if failure and not shaken:
            state, again = seen_before(state, failure, state.generation)
            if again:
                return finish(state, EXIT_FAILED, said.detail, replace(said, what="failed_again"))
        state = replace(state, startup_restarts=state.startup_restarts + 1)
    else:
        return finish(state, code, said.detail, said)
    return _restart(config, state, t, replace(said, what="restarting"))


def attempt_name(config: Config, attempt: int, pause: float) -> str:
    """Name the coming attempt, counted from 1, of all that --max-restarts allows: `2 of 3`. Start-up restarts go beyond."""
    of = f" of {config.max_restarts + 1}" if attempt <= config.max_restarts + 1 else ""
    return f"{attempt}{of}" + (f", after a pause of {pause:g} s" if pause else "")


def _restart(config: Config, state: State, t: float, said: Say, at_once: bool = False) -> Result:
    """`at_once`: no worker is told to end, and given time for it."""
    early = not state.armed and t - state.attempt_since < EARLY
    failures = state.early_failures + 1 if early else 0
    # Restart spares as well: they ran the script up to its first question for the rank, and may have looked for a checkpoint
    # that the old world wrote only afterwards. They would begin at another step than the rest.
    gone = [w.cell for w in state.workers]
    told = [w.cell for w in state.ranked() if w.started and not (w.dying or w.dead or w.finished or at_once)]
    state = replace(
        state.drop(gone),
        phase=RunPhase.RESTARTING,
        generation=state.generation + 1,
        attempt=state.attempt + 1,
        holder=(None,) * len(state.holder),
        lost=(None,) * len(state.holder),
        protected=(False,) * len(state.holder),
        stepped=False,
        tail=(),
        opened=False,
        recovering=False,
        repaired=False,
        doubted=False,
        rollback=-1,
        early_failures=failures,
        store_ready=False,
        backoff_over=failures < 2,
        leaving=(*state.leaving, *told),
    )
    pause = min(BACKOFF_MOST, BACKOFF_FIRST * 2.0 ** min(failures - 2, 10)) if failures >= 2 else 0.0
    said = replace(said, attempt=attempt_name(config, state.attempt + 1, pause))
    orders: list[Action] = [said, *(Dismiss(c) if c in told else Fence(c) for c in gone), StartService("store")]
    if state.leaving:
        orders.append(Deadline("leave", state.generation, config.shutdown_timeout))
    if pause:
        orders.append(Deadline("backoff", state.generation, pause))
    return state, tuple(orders)


def go_on(config: Config, state: State, t: float) -> Result:
    """Leave RESTARTING once the old world is gone, the new store answers and the pause is over."""
    if state.leaving or not (state.store_ready and state.backoff_over):
        return state, ()
    return open_world(config, state, t)


def peer_failed(config: Config, state: State, event: PeerFailed) -> Result:
    """Stop, and meet the other nodes in the next world: another node ended this one, or has this one's place, and writes where it would."""
    if state.phase is not RunPhase.RESTARTING:
        said = Say("evicted" if event.evicted else "peer_failed", detail=event.cause)
        return _restart(config, state, event.t, said, at_once=event.evicted)
    if not state.store_ready:
        return state, ()
    return replace(state, store_ready=False), (StartService("store"),)  # it broke before we could start in it


def store_gone(config: Config, state: State, t: float) -> Result:
    """End the world: the store in which the workers of several nodes meet died, and they could make no group without it."""
    return _restart(config, state, t, Say("service_died", detail="store"))


def left(config: Config, state: State, worker: int, t: float) -> Result:
    """Fence a worker of the old world that ended as ordered: the processes that it started end with it."""
    state = replace(state, leaving=tuple(c for c in state.leaving if c != worker))
    state, orders = go_on(config, state, t)
    return state, (Fence(worker), *orders)


def pause_expired(config: Config, state: State, event: Expired) -> Result:
    """Go on when the pause is over, or the time in which the old world's workers may clean up."""
    if event.generation != state.generation:
        return state, ()
    fences: tuple[Action, ...] = ()
    if event.name == "backoff":
        state = replace(state, backoff_over=True)
    elif event.name == "leave":
        fences = tuple(Fence(c) for c in state.leaving)
        state = replace(state, leaving=())
    state, orders = go_on(config, state, event.t)
    return state, (*fences, *orders)


def start_expired(config: Config, state: State, event: Expired) -> Result:
    late = [w for w in state.ranked() if not w.started]
    if event.name != "start" or event.generation != state.generation or not late:
        return state, ()
    cause = f"did not start in {config.start_timeout:g} s"
    return restart_or_end(config, state, event.t, Say("failed", late[0].cell, late[0].rank, cause))


def died_early(config: Config, state: State, death: Died, rank: int, orders: tuple[Action, ...]) -> Result:
    """Answer a death before every rank was protected: restart the world, or end."""
    cause = death.signature or death.cause
    said = Say("failed", death.worker, rank, cause)
    state, more = restart_or_end(config, state, death.t, said, failure=failure_key(death))
    return state, (*orders, *more)
