"""The controller: a pure function (state, event) -> (state, actions), all transitions in one table.

No clock (times come in the events), no I/O, no torch. An event that is not in the table, names a worker that never
was or a generation still to come raises IllegalEvent and changes nothing. Events about workers no longer in the
world and answers of an old generation are late, not illegal: they change nothing either.

Theory of operation. A run is in one of these states (`RunPhase`):

    new         the store and the devices are not known yet
    starting    workers were ordered; not every rank has begun its script. A deadline ends it
    running     the usual case. Before every rank has called protect() a death leads to restarting, after that to stopping
    stopping    the gate is being closed into a new generation; who holds which rank is open, and so is the step to go on with
    repairing   the world file of that generation is published: survivors rewind and reconnect, replacements restore, all do step `resume`
    restarting  every worker is told to end; then starting again, after a pause of 0.5 to 30 s
    ending      workers are told to end, the exit code is known
    ended       nothing waits for anybody any more

The next world is published once the gate is closed and the end of every dying worker is known; survivors may still be in their bodies.
How far a repair is follows from its least advanced rank (`incidents.progress`), since a group needs everyone; when all ranks are
restored the gate opens again. A fault in any state of a repair goes back to stopping with the next generation, and every action may
be ordered twice: so faults in a repair need no rules of their own.

What each side sees. Workers see generations, never phases: the gate word says that the world is stopped, the world file says who is
who in the next one, their answers are words in their cells. The agent (`ftrun.host.run.agent.Agent`) makes events of those, and
carries out orders. The journal has each event with its answer, so that a run can be replayed as a test (`ftrun.control.replay`).

A death in the loop comes twice. Dying (the liveness lock was lost: 0.3 ms after the kill, at 100 MB as at 1 GB) stops the others at
once; Died follows when the exit code shows, and the policy is asked then. To decide at the first sign was tried: on a busy machine the
code comes late, and an exit was called a death without a cause.

What the agent must know:
- Generations only grow, but not every one is closed on the gate: a tail world (`Publish.tail`: deaths after the loop)
  and a restart skip the gate. CloseGate therefore swaps the word to exactly the generation it names.
- Every action is idempotent: the machine may order the same one twice (a Spawn after the fork server's return, a
  CloseGate whose answer is late).
- In one look at a cell report in this order: Started, Parked, Grouped, Protected, Stepped, Raised (with its
  generation), Doubted, Stage, LoopDone, Unrestorable, death. A death is reported once, by Died or by Finished; Dying may come before Died.
- After a Terminate comes End in the same answer: end the workers, then leave with End's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ftrun.control import budgets, incidents, restarts
from ftrun.control import events as ev
from ftrun.control.device import faults as device_faults
from ftrun.control.events import Action, Event, Fence, Say, Spawn, StartService
from ftrun.control.phases import INCIDENT, LIVE, OVER, RunPhase
from ftrun.control.states import STAGES, Config, IllegalEvent, Result, State, WorkerStage, WorkerState, with_item
from ftrun.core.errors import EXIT_FAILED, EXIT_OK, EXIT_SIGNAL

__all__ = [
    "INCIDENT",
    "LIVE",
    "OVER",
    "STAGES",
    "TABLE",
    "Config",
    "IllegalEvent",
    "RunPhase",
    "State",
    "WorkerStage",
    "WorkerState",
    "advance",
    "initial",
]

Handler = Callable[[Config, State, Any], Result]


def initial(config: Config) -> State:
    """The state before Begin."""
    nobody: tuple[int | None, ...] = (None,) * config.nproc
    return State(RunPhase.NEW, holder=nobody, lost=nobody, protected=(False,) * config.nproc)


def advance(config: Config, state: State, event: Event) -> Result:
    """The next state, and what to do now, in this order.

    Raises:
        IllegalEvent
    """
    handler = TABLE.get((state.phase, type(event)))
    if handler is None:
        raise IllegalEvent(f"{type(event).__name__} cannot happen in {state.phase}")
    if state.phase not in OVER:
        worker, generation = getattr(event, "worker", None), getattr(event, "generation", None)
        if worker is not None and not 0 <= worker < state.next_worker:
            raise IllegalEvent(f"{type(event).__name__} of worker {worker}, who was never started")
        if generation is not None and generation > state.generation:
            raise IllegalEvent(f"{type(event).__name__} of generation {generation}, now is {state.generation}")
    return handler(config, state, event)


# ---- handlers that need no file of their own -------------------------------------------------------------------------


def late(config: Config, state: State, event: Event) -> Result:
    """Ignore an event that nothing waits for any more."""
    return state, ()


def begin(config: Config, state: State, event: ev.Begin) -> Result:
    state, orders = restarts.open_world(config, replace(state, generation=1), event.t)
    if state.phase is not RunPhase.STARTING:
        return state, orders  # no healthy device for every rank
    spawns: list[Action] = []
    for _ in range(config.spares):
        state, cell = budgets.allocate(state, None)
        spawns.append(Spawn(cell, None))
    *first, deadline = orders
    return state, (*first, *spawns, deadline)


def milestone(
    config: Config, state: State, event: ev.Started | ev.Parked | ev.Grouped | ev.Protected | ev.Stepped | ev.LoopDone
) -> Result:
    """Take over a worker's milestone in its script. Each one implies that it started."""
    worker = state.worker(event.worker)
    if worker is None:
        return state, ()
    worker = replace(worker, started=True)
    if isinstance(event, ev.Parked) and worker.rank is None:
        worker = replace(worker, parked=True)
        state = replace(state, spare_failures=0)
    elif isinstance(event, ev.Grouped):
        worker = replace(worker, grouped=True)
    elif isinstance(event, ev.LoopDone):
        worker = replace(worker, loop_done=event.done)
    elif isinstance(event, ev.Protected) and worker.rank is not None:
        state = replace(state, protected=with_item(state.protected, worker.rank, True))
    elif isinstance(event, ev.Stepped) and worker.rank is not None:
        state = replace(state, stepped=True)
    state = state.put(worker)
    if state.phase is RunPhase.STARTING:
        return _started(config, state)
    return incidents.progress(config, state)


def dying(config: Config, state: State, event: ev.Dying) -> Result:
    """Stop the others at once; what is done about the death is decided when its exit code is known (Died)."""
    worker = state.worker(event.worker)
    if worker is None or worker.rank is None or worker.loop_done or worker.dying:
        return state, ()
    if not state.armed or any(w.finished for w in state.workers):
        return state, ()  # not repaired in place
    state = state.put(replace(worker, dying=True))
    if state.phase is RunPhase.STOPPING:
        return state, ()
    return incidents.stop(config, state)


def died(config: Config, state: State, event: ev.Died) -> Result:
    if event.worker in state.leaving:
        return restarts.left(config, state, event.worker, event.t)
    worker = state.worker(event.worker)
    if worker is None or worker.finished:
        return state, ()
    if worker.rank is None:
        return _spare_died(config, state, worker, event.signature or event.cause)
    return incidents.lose(config, state, [event])


def finished(config: Config, state: State, event: ev.Finished) -> Result:
    if event.worker in state.leaving:
        return restarts.left(config, state, event.worker, event.t)
    worker = state.worker(event.worker)
    if worker is None or worker.finished:
        return state, ()
    if worker.rank is None:
        return _spare_unneeded(state, worker)
    if state.phase in INCIDENT and worker.rank in state.replaced and not event.through:
        return incidents.lose(config, state, [incidents.left_early(event)])
    state = state.put(replace(worker, started=True, finished=True))
    if all(c is not None and _is_finished(state, c) for c in state.holder):
        if config.shared:
            return replace(state, phase=RunPhase.RUNNING), (ev.NodeDone(),)
        return budgets.finish(state, EXIT_OK, "done", Say("done"))
    if state.phase is RunPhase.STARTING:
        return _started(config, state)
    return incidents.progress(config, state)


def service_died(config: Config, state: State, event: ev.ServiceDied) -> Result:
    state, too_often = budgets.service_lost(state, event.service, event.t)
    if too_often:
        given_up = Say("service_given_up", detail=event.service)
        return budgets.finish(state, EXIT_FAILED, f"{event.service} died too often", given_up)
    if event.service == "store" and config.shared and state.phase in _STABLE:
        return restarts.store_gone(config, state, event.t)
    if event.service == "store":
        met = state.armed and state.phase is not RunPhase.REPAIRING
        state = replace(state, store_ready=False, store_lost=state.store_lost or not met)
    return state, (Say("service_died", detail=event.service), StartService(event.service))


def service_ready(config: Config, state: State, event: ev.ServiceReady) -> Result:
    """Repeat what the dead service may have lost: a fork order, or the entries by which ranks meet each other."""
    if event.service == "store":
        state = replace(state, store_ready=True)
        if state.phase is RunPhase.RESTARTING:
            return restarts.go_on(config, state, event.t)
        if state.store_lost and incidents.meeting(state):
            return incidents.stop(config, state)
    if event.service == "fork server":
        return state, tuple(Spawn(w.cell, w.rank) for w in state.workers if not w.started)
    return state, ()


def signalled(config: Config, state: State, event: ev.Signalled) -> Result:
    said = Say("signalled", detail=str(event.signum))
    return budgets.finish(state, EXIT_SIGNAL + event.signum, f"signal {event.signum}", said)


def world_ended(config: Config, state: State, event: ev.WorldEnded) -> Result:
    if event.drained:  # at once: the other nodes wait for this one until its workers have ended
        said = Say("drained", detail=event.detail)
        state, orders = budgets.finish(state, EXIT_OK, event.detail, said, failed=False, worn_out=True)
        return state, (*(Fence(worker.cell) for worker in state.ranked()), *orders)
    said = Say("done") if event.code == EXIT_OK else Say("world_ended", detail=event.detail)
    return budgets.finish(state, event.code, event.detail, said)


def end_at_once(config: Config, state: State, event: ev.Signalled) -> Result:
    """End all workers at once: a signal came while the run was already ending. The exit code stays."""
    assert state.exit_code is not None
    fences = tuple(Fence(c) for c in (*state.leaving, *(w.cell for w in state.workers)))
    return replace(state, phase=RunPhase.ENDED), (*fences, ev.End(state.exit_code, f"signal {event.signum}"))


def _started(config: Config, state: State) -> Result:
    if not all(w.started for w in state.ranked()):
        return state, ()
    return budgets.replenish(config, replace(state, phase=RunPhase.RUNNING))


def _spare_died(config: Config, state: State, worker: WorkerState, cause: str) -> Result:
    state, said = budgets.spare_lost(state.drop([worker.cell]), worker)
    state, spawns = budgets.replenish(config, state)
    return state, (Fence(worker.cell), Say("spare_died", worker.cell, detail=cause), *said, *spawns)


def _spare_unneeded(state: State, worker: WorkerState) -> Result:
    """Give spares up: a script that never asks for its rank has no place to park. That is no failure, so no new spare starts."""
    told = () if state.spares_given_up else (Say("spare_unneeded", worker.cell),)
    state = replace(state.drop([worker.cell]), spares_given_up=True)
    return state, (Fence(worker.cell), *told)


def _is_finished(state: State, cell: int) -> bool:
    worker = state.worker(cell)
    return worker is not None and worker.finished


# ---- the table -------------------------------------------------------------------------------------------------------

_STABLE = (RunPhase.STARTING, RunPhase.RUNNING, *INCIDENT)

_ROWS: tuple[tuple[Iterable[RunPhase], type[Event], Handler], ...] = (
    ((RunPhase.NEW,), ev.Begin, begin),
    # milestones of a worker's script
    (LIVE, ev.Started, milestone),
    (LIVE, ev.Parked, milestone),
    (LIVE, ev.Grouped, milestone),
    (LIVE, ev.Stepped, milestone),
    (LIVE, ev.Protected, milestone),
    (LIVE, ev.LoopDone, milestone),
    # ends of workers, and exceptions
    ((RunPhase.RUNNING, *INCIDENT), ev.Dying, dying),
    ((RunPhase.STARTING, RunPhase.RESTARTING), ev.Dying, late),
    (LIVE, ev.Died, died),
    (LIVE, ev.Finished, finished),
    (_STABLE, ev.Raised, incidents.raised),
    ((RunPhase.RESTARTING,), ev.Raised, late),
    # the course of an incident
    ((RunPhase.STOPPING,), ev.GateClosed, incidents.gate_closed),
    ((RunPhase.STARTING, RunPhase.RUNNING, RunPhase.REPAIRING, RunPhase.RESTARTING), ev.GateClosed, late),
    ((RunPhase.RUNNING, *INCIDENT), ev.Stage, incidents.staged),
    ((RunPhase.STARTING, RunPhase.RESTARTING), ev.Stage, late),
    ((RunPhase.RUNNING, *INCIDENT), ev.Unrestorable, incidents.unrestorable),
    ((RunPhase.STARTING, RunPhase.RESTARTING), ev.Unrestorable, late),
    (INCIDENT, ev.Unconnected, incidents.unconnected),
    ((RunPhase.STARTING, RunPhase.RUNNING, RunPhase.RESTARTING), ev.Unconnected, late),
    ((RunPhase.RUNNING, *INCIDENT), ev.Stalled, incidents.stalled),
    ((RunPhase.STARTING, RunPhase.RESTARTING), ev.Stalled, late),
    ((RunPhase.RUNNING,), ev.Stuck, incidents.stuck),
    ((RunPhase.STARTING, *INCIDENT, RunPhase.RESTARTING), ev.Stuck, late),
    (_STABLE, ev.Doubted, incidents.doubted),
    ((RunPhase.RESTARTING,), ev.Doubted, late),
    ((RunPhase.NEW, *LIVE), ev.Noticed, incidents.noticed),
    # deadlines
    ((RunPhase.STARTING,), ev.Expired, restarts.start_expired),
    (INCIDENT, ev.Expired, incidents.stop_expired),
    ((RunPhase.RUNNING,), ev.Expired, late),
    ((RunPhase.RESTARTING,), ev.Expired, restarts.pause_expired),
    # our own processes
    ((RunPhase.NEW, *LIVE), ev.ServiceDied, service_died),
    ((RunPhase.NEW, *LIVE), ev.ServiceReady, service_ready),
    # devices
    ((RunPhase.NEW, *LIVE), ev.Devices, device_faults.known),
    ((RunPhase.NEW, *LIVE), ev.DeviceFault, device_faults.fault),
    ((RunPhase.NEW, *LIVE), ev.Probed, device_faults.probed),
    ((RunPhase.NEW, *LIVE), ev.DeviceOut, device_faults.out),
    ((RunPhase.NEW, *LIVE), ev.DeviceBack, device_faults.back),
    # the other nodes
    ((*_STABLE, RunPhase.RESTARTING), ev.PeerFailed, restarts.peer_failed),
    ((RunPhase.NEW,), ev.PeerFailed, late),
    (_STABLE, ev.WorldStops, incidents.world_stops),
    ((RunPhase.NEW, RunPhase.RESTARTING), ev.WorldStops, late),
    ((RunPhase.NEW, RunPhase.RESTARTING), ev.Seated, incidents.seated),
    (_STABLE, ev.Seated, late),
    ((RunPhase.STOPPING,), ev.WorldDecided, incidents.world_decided),
    ((RunPhase.STARTING, RunPhase.RUNNING, RunPhase.REPAIRING, RunPhase.RESTARTING), ev.WorldDecided, late),
    ((RunPhase.REPAIRING,), ev.WorldRestored, incidents.world_restored),
    ((RunPhase.STARTING, RunPhase.RUNNING, RunPhase.STOPPING, RunPhase.RESTARTING), ev.WorldRestored, late),
    ((RunPhase.NEW, *LIVE), ev.WorldEnded, world_ended),
    # the end
    ((RunPhase.NEW, *LIVE), ev.Signalled, signalled),
    ((RunPhase.ENDING,), ev.Signalled, end_at_once),
    ((RunPhase.ENDED,), ev.Signalled, late),
    *((OVER, event, late) for event in Event.__subclasses__() if event is not ev.Signalled),
)

TABLE: dict[tuple[RunPhase, type[Event]], Handler] = {
    (phase, event): handler for phases, event, handler in _ROWS for phase in phases
}
