"""Repairs in place: stop, clean, reset, restore, resume; and the tail after the loop, where nobody is stopped.

No clock, no I/O, no torch here. Every fault in an incident starts it again with a higher generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ftrun.control import budgets, events, policy, restarts
from ftrun.control.device import state as devices
from ftrun.control.events import Action, CloseGate, Deadline, Died, Fence, OpenGate, Publish, Say, Spawn
from ftrun.control.phases import INCIDENT, RunPhase
from ftrun.control.responses import Response
from ftrun.control.states import (
    NOWHERE,
    STAGES,
    Config,
    IllegalEvent,
    Result,
    State,
    WorkerStage,
    WorkerState,
    with_item,
)
from ftrun.core.errors import EXIT_FAILED, EXIT_REQUEUE, EXIT_STALLED
from ftrun.core.faults import Fault

AFTER_LOOP = -1  # Publish.resume of a tail world


def lose(config: Config, state: State, deaths: Sequence[Died]) -> Result:
    """Ranks lost their workers (all still in `state`): charge the budgets, then recover, restart or end."""
    orders: list[Action] = []
    for death in deaths:
        worker = replace(_holding(state, death.worker), dead=True)
        state = state.put(worker)
        orders += [Fence(worker.cell), Say("died", worker.cell, worker.rank, death.signature or death.cause)]
    first = _holding(state, deaths[0].worker)
    assert first.rank is not None
    for death in deaths:
        if death.final:
            worker = _holding(state, death.worker)
            said = Say("failed", worker.cell, worker.rank, death.signature or death.cause)
            state, more = budgets.finish(state, death.final, f"rank {worker.rank}: {said.detail}", said)
            return state, (*orders, *more)
    for death in deaths:
        if state.armed and death.fault == Fault.EXCEPTION and death.outside:
            # as under torchrun: the script did not finish its work there, and a replacement would never do it
            worker = _holding(state, death.worker)
            said = Say("failed", worker.cell, worker.rank, f"{death.signature or death.cause}, {death.outside}")
            state, more = restarts.restart_or_end(config, state, death.t, said, full=False)
            return state, (*orders, *more)
    state, more, over = _as_the_policy_says(config, state, deaths)
    orders += more
    if over:
        return state, tuple(orders)
    if not state.armed:
        return restarts.died_early(config, state, deaths[0], first.rank, tuple(orders))
    in_tail = [d.loop_done or _holding(state, d.worker).rank in state.tail for d in deaths]
    # the launcher stopped the world at the first sign of these deaths: whoever finished did so after that
    stopped = state.phase is RunPhase.STOPPING and all(_holding(state, d.worker).dying for d in deaths)
    if not stopped and any(w.finished for w in state.workers) and not all(in_tail):
        said = Say("cannot_recover", first.cell, first.rank, "another rank has already finished")
        state, more = restarts.restart_or_end(config, state, deaths[0].t, said)
        return state, (*orders, *more)
    for death in deaths:
        if state.store_lost and death.signature:
            continue  # an exception because of our store's end is not the program's
        state, ending = budgets.charge(config, state, _holding(state, death.worker), death)
        if ending is not None:
            return state, (*orders, *ending)
    for death in deaths:
        state = _vacate(state, _holding(state, death.worker))
    elsewhere = [w for w in state.workers if w.rank is not None and not w.loop_done and not w.finished]
    quiet = state.phase is RunPhase.RUNNING and not devices.short(config, state)
    if quiet and all(in_tail) and all(w.rank in state.tail for w in elsewhere):
        state, more = _tail(config, state)
    elif stopped and not state.reported:  # the other nodes must know which ranks are lost
        state, more = _meet(config, state)
    else:
        state, more = stop(config, state)
    return state, (*orders, *more)


def _as_the_policy_says(config: Config, state: State, deaths: Sequence[Died]) -> tuple[State, tuple[Action, ...], bool]:
    """Apply the policy where it answers deaths with more, or less, than another worker. True = there is nothing more to do."""
    orders: list[Action] = []
    for death in deaths:
        if death.fault in policy.OF_DEVICES:
            continue  # decided already, about the device
        worker = _holding(state, death.worker)
        assert worker.rank is not None
        response, what = policy.of_dead(config.policy, death.fault), death.signature or death.cause
        if response is Response.STOP:
            said = Say("stopped_by_policy", worker.cell, worker.rank, f"rank {worker.rank}: {what}")
            state, more = budgets.finish(state, EXIT_FAILED, said.detail, said)
            return state, (*orders, *more), True
        if response is Response.ROLL_BACK:
            said = Say("failed", worker.cell, worker.rank, what)
            state, more = restarts.restart_or_end(config, state, death.t, said)
            return state, (*orders, *more), True
        device = devices.of_rank(state, worker.rank)
        if response is Response.QUARANTINE and device:
            state, more = devices.condemn(state, (device,), f"rank {worker.rank}: {what}")
            orders += more
    return state, tuple(orders), False


def stop(config: Config, state: State) -> Result:
    """Begin an incident, or begin it again: the next generation, gate closed into it."""
    state = replace(
        state.each(lambda w: replace(w, stage=WorkerStage.NONE)),
        phase=RunPhase.STOPPING,
        generation=state.generation + 1,
        tail=(),
        resume=-1,
        opened=False,
        last=None,
        reported=WorkerStage.NONE,
        recovering=True,
        repaired=True,
        store_lost=False,
    )
    return state, (CloseGate(state.generation), Deadline("stop", state.generation, config.stop_timeout))


def meeting(state: State) -> bool:
    """Have some ranks of a repair's world not met yet?"""
    return state.phase is RunPhase.REPAIRING and min(w.answered for w in state.ranked()) < WorkerStage.RESET


def gate_closed(config: Config, state: State, event: events.GateClosed) -> Result:
    """Take over the step to resume; on one of several nodes all of them decide it."""
    if event.generation != state.generation:
        return state, ()
    if config.shared:
        return _meet(config, replace(state, last=event.last))
    resume = event.last + 1 if state.rollback < 0 else state.rollback
    return _meet(config, replace(state, resume=resume))


def _meet(config: Config, state: State) -> Result:
    """Refill the empty ranks and tell everyone the new world, once its step and the ends of all dying workers are known."""
    if state.resume < 0:
        return _tell_stopped(state) if config.shared else (state, ())
    if any(w.dying for w in state.ranked()):
        return state, ()
    if devices.short(config, state):
        return devices.without(config, state)
    state, publish, spawns = _refill(config, replace(state, phase=RunPhase.REPAIRING), state.resume, tail=False)
    state, more = progress(config, state)
    return state, (publish, *spawns, *more)


def _tell_stopped(state: State) -> Result:
    """Tell the other nodes where this one stopped: once none of its ranks moves any more, its part of their decision is final."""
    moving = [w for w in state.survivors() if w.dying or w.answered < WorkerStage.STOPPED]
    if state.last is None or state.reported or moving:
        return state, ()
    whose = () if _some_left(state) else tuple(c for c in map(_first_of, state.lost, state.holder) if c is not None)
    told = events.TellStopped(state.generation, state.last, state.replaced, whose, state.rollback >= 0)
    return replace(state, reported=WorkerStage.STOPPED), (told,)


def _some_left(state: State) -> bool:
    """Has a rank left the loop? It cannot go back into it."""
    return any(w.loop_done or w.finished for w in state.workers)


def _first_of(dead: int | None, living: int | None) -> int | None:
    """Return the incarnation whose host snapshots are a rank's: of one whose node was lost, that which has brought a copy here."""
    return living if dead is None or (dead == NOWHERE and living is not None) else dead


def world_stops(config: Config, state: State, event: events.WorldStops) -> Result:
    """Stop with the other nodes; a node whose ranks cannot be repaired in place makes all of them start anew."""
    left = event.node_lost and any(w.loop_done for w in state.workers)  # who has left the loop meets nobody there any more
    if not state.armed or left or any(w.finished for w in state.workers):
        return restarts.peer_failed(config, state, events.PeerFailed(event.t, event.cause))
    state, orders = stop(config, state)
    return state, (Say("peer_stops", detail=event.cause), *orders)


def seated(config: Config, state: State, event: events.Seated) -> Result:
    """Take the place of a lost node: each of its ranks is replaced, and nothing of them is on this node."""
    begun, old = state.generation, tuple(Fence(c) for c in state.leaving)  # of a place that this node had before
    state = replace(
        state,
        holder=(None,) * config.nproc,
        lost=(NOWHERE,) * config.nproc,
        protected=(True,) * config.nproc,
        stepped=True,
        store_ready=True,
        attempt_since=event.t,
        leaving=(),
        reconnected=False,
        stood_still=(),
    )
    state, orders = stop(config, state)
    return state, (Say("seated", detail="drained" if event.drained else "lost"), *old, events.ResetGate(begun), *orders)


def world_decided(config: Config, state: State, event: events.WorldDecided) -> Result:
    """Take over the step that all nodes go on with, or go back to."""
    if event.generation != state.generation or not state.reported:
        return state, ()
    state, orders = _meet(config, replace(state, resume=event.resume, rollback=event.resume if event.rollback else -1))
    return state, (events.DecideGate(event.generation, event.resume), *orders)


def world_restored(config: Config, state: State, event: events.WorldRestored) -> Result:
    """Let the ranks of this node pass gates again, since every rank of every node is restored."""
    if event.generation != state.generation or state.opened:
        return state, ()
    state, orders = progress(config, replace(state, opened=True))
    return state, (OpenGate(event.generation), *orders)


def staged(config: Config, state: State, event: events.Stage) -> Result:
    """Take over a worker's answer to a stage of an incident (also the late "first_done", back in RUNNING)."""
    if event.stage not in STAGES:
        raise IllegalEvent(f"unknown stage {event.stage!r}")
    worker = state.worker(event.worker)
    if worker is None or worker.rank is None:
        return state, ()
    in_tail = worker.rank in state.tail and event.generation == worker.generation
    if event.generation != state.generation and not in_tail:
        return state, ()
    stage = max(worker.stage, STAGES[event.stage])
    generation = event.generation if stage >= WorkerStage.RESUMED else worker.generation
    return progress(config, state.put(replace(worker, stage=stage, generation=max(generation, worker.generation))))


def progress(config: Config, state: State) -> Result:
    """Move on as far as the least advanced rank allows."""
    for worker in state.ranked():
        assert worker.rank is not None
        if worker.answered >= WorkerStage.RESTORED and state.lost[worker.rank] is not None:
            state = replace(state, lost=with_item(state.lost, worker.rank, None))
    state = replace(state, tail=tuple(r for r in state.tail if r in state.replaced))
    orders: list[Action] = []
    if state.phase is RunPhase.STOPPING and config.shared:
        return _tell_stopped(state)
    if state.phase is RunPhase.REPAIRING:
        least = min(w.answered for w in state.ranked())
        if least >= WorkerStage.RESTORED and not state.opened and state.reported < WorkerStage.RESTORED:
            if _may_not_go_on(config, state):
                state, ending = _end_inexact(state)
                return state, (*orders, *ending)
            if config.shared:
                state = replace(state, reported=WorkerStage.RESTORED)
                orders.append(events.TellRestored(state.generation))
            else:
                state = replace(state, opened=True)
                orders.append(OpenGate(state.generation))
        if least >= WorkerStage.RESUMED and state.opened:
            now = state.generation
            state = replace(state, phase=RunPhase.RUNNING, rollback=-1)
            state = state.each(lambda w: w if w.rank is None else replace(w, generation=now))
            state, spawns = budgets.replenish(config, state)
            orders += spawns
    if _recovered(state):
        state = replace(state, recovering=False, reconnected=False, stood_still=())
        orders.append(Say("recovered", detail=str(state.generation)))
    return state, tuple(orders)


def doubted(config: Config, state: State, event: events.Doubted) -> Result:
    """Record a reason not to call the result exact. A repair gathers all of them until its gate would open; later one is enough."""
    worker = state.worker(event.worker)
    if worker is None or worker.rank is None:
        return state, ()
    state = replace(state, doubted=True)
    gathering = state.phase in INCIDENT and not state.opened and state.reported < WorkerStage.RESTORED
    return (state, ()) if gathering or not _may_not_go_on(config, state) else _end_inexact(state)


def _may_not_go_on(config: Config, state: State) -> bool:
    return config.inexact_stops and state.repaired and state.doubted


def _end_inexact(state: State) -> Result:
    """End with the requeue code: script, machine and saved state are sound, so the run may be started again."""
    return budgets.finish(state, EXIT_REQUEUE, "a repair that is not exact", Say("inexact"), failed=False)


def raised(config: Config, state: State, event: events.Raised) -> Result:
    """Answer an exception in a body: everybody does the step again once; the same exception a second time is the program's fault."""
    worker = state.worker(event.worker)
    if worker is None or worker.rank is None:
        return state, ()
    said = Say("raised", worker.cell, worker.rank, event.signature)
    generation = worker.generation if event.generation is None else event.generation
    fault = event.fault or Fault.EXCEPTION.value
    response = policy.of_worker(config.policy, fault)
    if response is Response.STOP:
        reason = f"rank {worker.rank}: {event.signature}"
        return budgets.finish(state, EXIT_FAILED, reason, replace(said, what="stopped_by_policy", detail=reason))
    if response is Response.ROLL_BACK:
        return restarts.restart_or_end(config, state, event.t, replace(said, what="failed"))
    if not state.armed:
        return restarts.restart_or_end(
            config, state, event.t, replace(said, what="failed"), failure=f"died {event.signature}"
        )
    if generation < worker.generation:
        return state, ()
    # an error is forgiven if neither the repeated step nor the one after it shows it: a reset may only hide it
    at = event.step if event.gate is None else event.gate
    known = {key for key, seen in state.failures if seen < generation}

    def keys(rank: int | None) -> list[str]:
        return [budgets.in_step(f"raised {event.signature}", rank, step) for step in (at, at - 1)]

    # the exchange gives one rank's non-finite value to every rank, and the first to look raises
    whose = keys(None if fault == Fault.NONFINITE.value else worker.rank)
    state, _ = budgets.seen_before(state, whose[0], generation)
    if not known.isdisjoint(whose):
        reason = f"rank {worker.rank}: {event.signature}, twice"
        return budgets.finish(state, EXIT_FAILED, reason, replace(said, what="raised_again"))
    if state.phase in INCIDENT and generation < state.generation:
        return state, ()  # it left its body in the old generation and stops without an order, like any survivor
    if any(w.finished for w in state.workers):
        cannot = Say("cannot_recover", worker.cell, worker.rank, "another rank has already finished")
        return restarts.restart_or_end(config, state, event.t, cannot)
    if response in (Response.REPLACE, Response.QUARANTINE):
        return lose(config, state, condemned([worker], event.t, event.signature, fault, event.evidence))
    if any(not known.isdisjoint(keys(rank)) for rank in range(config.nproc)):
        state, ending = budgets.count_failure(config, state, worker, event.t)
        if ending is not None:
            return state, (said, *ending)
    state, orders = stop(config, state)
    return state, (said, *orders)


def noticed(config: Config, state: State, event: events.Noticed) -> Result:
    """Pass on a report. Nothing follows from it unless the user's policy says so."""
    worker = None if event.worker is None else state.worker(event.worker)
    rank = None if worker is None else worker.rank
    response = policy.of_worker(config.policy, event.fault)
    if response is Response.STOP:
        said = Say("stopped_by_policy", event.worker, rank, event.evidence)
        return budgets.finish(state, EXIT_FAILED, event.evidence, said)
    taken = response in (Response.REPLACE, Response.QUARANTINE, Response.ROLL_BACK)
    if taken and worker is not None and rank is not None and state.phase is RunPhase.RUNNING and state.armed:
        fault, why = event.fault, event.evidence
        return lose(config, state, [Died(event.t, worker.cell, f"a {fault}", fault=fault, evidence=why)])
    return state, (Say("noticed", event.worker, rank, event.evidence),)


def unrestorable(config: Config, state: State, event: events.Unrestorable) -> Result:
    """Send everybody back to the host snapshot, else restart the world or end: rungs 1 to 3 are out for a replaced rank.

    This holds also when the world was stopped again since: the worker has given up, and says so once.
    """
    worker = state.worker(event.worker)
    if worker is None or worker.rank not in state.replaced:
        return state, ()
    if state.rollback >= 0 and event.generation < state.generation:
        return state, ()  # it gave up in the world before: now it gets the snapshot
    said = Say("unrestorable", worker.cell, worker.rank, event.why)
    if event.snapshot >= 0 and state.rollback < 0 and not _some_left(state):
        state, orders = stop(config, replace(state, rollback=event.snapshot))
        return state, (replace(said, what="rolling_back"), *orders)
    code = EXIT_REQUEUE if event.requeue else EXIT_FAILED
    return restarts.restart_or_end(config, state, event.t, said, full=False, code=code)


def unconnected(config: Config, state: State, event: events.Unconnected) -> Result:
    """Suspect the links first: make all connections again, once in an incident. After that, suspect the rank."""
    worker = state.worker(event.worker)
    if worker is None or worker.rank is None or event.generation < state.generation or not meeting(state):
        return state, ()  # stopped meanwhile: the new world answers it
    if state.store_lost:
        return state, ()  # they cannot meet in a store that died: the launcher stops everyone when there is another one
    said = Say("unconnected", worker.cell, worker.rank, event.evidence)
    if policy.of_worker(config.policy, Fault.LINK) is Response.STOP:
        reason = f"rank {worker.rank}: {event.evidence}"
        return budgets.finish(state, EXIT_FAILED, reason, replace(said, what="stopped_by_policy", detail=reason))
    if state.reconnected:
        cause = "could not be connected with the other ranks again"
        return lose(config, state, condemned([worker], event.t, cause, Fault.LINK.value, event.evidence))
    state, orders = stop(config, replace(state, reconnected=True))
    return state, (said, *orders)


def stuck(config: Config, state: State, event: events.Stuck) -> Result:
    """Suspect the links: make all connections again, replace nobody. If that did not help, end."""
    if not state.armed or event.generation != state.generation or any(w.finished for w in state.workers):
        return state, ()
    response = policy.of_worker(config.policy, Fault.LINK)
    state, again = budgets.seen_before(state, f"stuck at {event.step}", event.generation)
    if response is Response.STOP:
        reason = f"every rank waits in {event.what}"
        return budgets.finish(state, EXIT_FAILED, reason, Say("stopped_by_policy", detail=reason))
    if again:
        reason = f"every rank waits in {event.what}, again after a reset"
        return budgets.finish(state, EXIT_FAILED, reason, Say("stuck_again", detail=event.what))
    state, orders = stop(config, state)
    return state, (Say("stuck", detail=event.what), *orders)


def stop_expired(config: Config, state: State, event: events.Expired) -> Result:
    """Give up survivors that did not stop in time."""
    if event.generation != state.generation or event.name != "stop":
        return state, ()
    busy = [w for w in state.survivors() if w.answered < WorkerStage.STOPPED]
    if busy:
        return lose(config, state, condemned(busy, event.t, f"did not stop in {config.stop_timeout:g} s"))
    if state.phase is RunPhase.REPAIRING:
        return state, ()
    # The agent still owes GateClosed: ask again, asking twice is harmless.
    return state, (CloseGate(state.generation), Deadline("stop", state.generation, config.stop_timeout))


def awaited(state: State) -> list[WorkerState]:
    """Return whom the repair waits for: the least advanced ranks (groups need everyone); after the loop, replacements on their way."""
    if state.phase is RunPhase.REPAIRING:
        least = min(_reached(state, w) for w in state.ranked())
        return [w for w in state.ranked() if _reached(state, w) == least]
    return [w for w in state.ranked() if state.phase is RunPhase.RUNNING and w.rank in state.tail]


def in_its_script(state: State, worker: WorkerState) -> bool:
    """Is an awaited worker, which has its rank's state, in the script's own code between two steps?"""
    return worker.rank not in state.replaced and not WorkerStage.CLEANED <= worker.answered < WorkerStage.RESTORED


def stalled(config: Config, state: State, event: events.Stalled) -> Result:
    """Replace who holds a repair up; the second time in an incident another worker is no help."""
    slow = awaited(state)
    if event.generation != state.generation or not slow or {w.cell for w in slow} - {*event.workers}:
        return state, ()
    if config.shared and _waits_for_other_nodes(state):
        return state, ()
    cause = f"held the repair up: no progress for {event.seconds:.0f} s" + (f" at {event.where}" if event.where else "")
    if len(slow) == len(state.holder) > 1 and min(w.answered for w in slow) == WorkerStage.READY:
        # all want to meet the others and cannot: the links are the suspects
        said = Say("unconnected", slow[0].cell, slow[0].rank, cause)
        if state.reconnected:
            said = replace(said, what="stalled_again")
            return restarts.restart_or_end(config, state, event.t, said, full=False, code=EXIT_STALLED)
        state, orders = stop(config, replace(state, reconnected=True))
        return state, (said, *orders)
    slow = [w for w in slow if w.rank in state.replaced] or slow
    again = next((w for w in slow if w.rank in state.stood_still), None)
    if again is not None:
        said = Say("stalled_again", again.cell, again.rank, cause)
        return restarts.restart_or_end(config, state, event.t, said, full=False, code=EXIT_STALLED)
    ranks = tuple(w.rank for w in slow if w.rank is not None)
    state = replace(state, stood_still=(*state.stood_still, *ranks))
    return lose(config, state, condemned(slow, event.t, cause))


def _waits_for_other_nodes(state: State) -> bool:
    """Does no rank of this node hold a repair up? A replacement of its own has work of its own until it is restored."""
    stages = {w.answered for w in state.ranked()}
    if state.phase is not RunPhase.REPAIRING or state.opened:
        return False
    return stages == {WorkerStage.READY} or min(stages) >= (WorkerStage.RESTORED if state.replaced else WorkerStage.READY)


def left_early(event: events.Finished) -> Died:
    """Make a death of a replacement whose script ended before it took part in a loop: others wait for it."""
    why = "its script ended before it came to the loop"
    return Died(event.t, event.worker, why, 0, signature=f"exit code 0, {why}", fault=Fault.EXIT.value, evidence=why)


def condemned(
    workers: Sequence[WorkerState], t: float, cause: str, fault: str = Fault.HANG.value, evidence: str = ""
) -> list[Died]:
    """Make the deaths of workers that still live and must be ended."""
    why = evidence or f"it {cause}"
    return [Died(t, w.cell, cause, loop_done=w.loop_done, fault=fault, evidence=why) for w in workers]


def _reached(state: State, worker: WorkerState) -> WorkerStage:
    """Return how far a worker is; a new holder has nothing to stop or to clean."""
    fresh = worker.started and worker.rank in state.replaced
    return max(worker.answered, WorkerStage.CLEANED) if fresh else worker.answered


def _holding(state: State, cell: int) -> WorkerState:
    worker = state.worker(cell)
    assert worker is not None
    assert worker.rank is not None
    return worker


def _recovered(state: State) -> bool:
    if state.phase is not RunPhase.RUNNING or not state.recovering or state.tail:
        return False
    # After a tail world (gate never opened for it) it is enough that the new holders have their state.
    return not state.opened or min(w.answered for w in state.ranked()) >= WorkerStage.FIRST_DONE


def _vacate(state: State, worker: WorkerState) -> State:
    """Remove a dead worker. A holder that never had the rank's state leaves the rank's `lost` as it was."""
    assert worker.rank is not None
    state = replace(state.drop([worker.cell]), holder=with_item(state.holder, worker.rank, None))
    if state.lost[worker.rank] is None:
        state = replace(state, lost=with_item(state.lost, worker.rank, worker.cell))
    return state


def _tail(config: Config, state: State) -> Result:
    """Answer deaths after the loop: nobody is stopped and the gate keeps its generation; the new holders run the tail."""
    empty = tuple(r for r, cell in enumerate(state.holder) if cell is None)
    tail = tuple(sorted({*state.tail, *empty}))
    state = replace(state, generation=state.generation + 1, tail=tail, opened=False, recovering=True, repaired=True)
    if _may_not_go_on(config, state):
        return _end_inexact(state)
    state, publish, spawns = _refill(config, state, AFTER_LOOP, tail=True)
    state, more = budgets.replenish(config, state)
    return state, (publish, *spawns, *more)


def _refill(config: Config, state: State, resume: int, *, tail: bool) -> tuple[State, Publish, tuple[Action, ...]]:
    """Give every empty rank a worker: a parked spare, else a started one, else a new fork (ordered after Publish)."""
    spawns: list[Action] = []
    state = devices.assign(config, replace(state, waiting=False))
    for rank, cell in enumerate(state.holder):
        if cell is not None:
            continue
        ready = sorted((w for w in state.spares() if w.started), key=lambda w: (not w.parked, w.cell))
        if ready:
            state = state.put(replace(ready[0], rank=rank, generation=state.generation, stage=WorkerStage.NONE))
            cell = ready[0].cell
        else:
            state, cell = budgets.allocate(state, rank)
            spawns.append(Spawn(cell, rank))
        state = replace(state, holder=with_item(state.holder, rank, cell))
    publish = Publish(
        generation=state.generation,
        resume=resume,
        workers=tuple(c for c in state.holder if c is not None),
        replaced=state.replaced,
        lost=tuple(c for c in state.lost if c is not None),
        tail=tail,
        attempt=state.attempt,
        devices=devices.visible(config, state),
        rollback=not tail and state.rollback >= 0,
    )
    return state, publish, tuple(spawns)
