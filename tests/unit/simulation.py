"""A simulated world that executes the controller's actions and checks each of them against what it knows."""

from __future__ import annotations

from dataclasses import dataclass

from ftrun.control import events as ev
from ftrun.control import incidents
from ftrun.control import machine as m
from ftrun.control.machine import RunPhase
from ftrun.control.replay import replay
from ftrun.core.faults import Fault
from tests.unit.driver import STAGES, Driver, says

SERVICES = ("fork server", "store", "fd store")


@dataclass
class Process:
    """A worker as the world knows it (the controller only hears events)."""

    cell: int
    rank: int | None
    alive: bool = True
    fenced: bool = False
    started: bool = False
    parked: bool = False
    protected: bool = False
    holds: bool = False  # has its rank's state
    world: int = 0  # newest published generation that names it
    stage: int = -1  # index into STAGES, for `stage_of`
    stage_of: int = 0
    leaving: bool = False  # it may leave its loop, and then end
    dying: bool = False  # that it ends was told, and not with which code
    told: bool = False  # to end, since the world starts anew
    loop_done: bool = False
    finished: bool = False

    @property
    def through(self) -> bool:
        return self.loop_done or self.finished


class Simulation:
    """Workers, services and an agent without processes. Faults come from outside; `finish` lets the run end."""

    def start(self, run: Driver, *, warm: bool = False) -> None:
        """Begin; `warm` = up to the first step."""
        self.run = run
        self.processes: dict[int, Process] = {}
        self.places: tuple[int, ...] = ()
        self.published: ev.Publish | None = None
        self.memory: dict[int, int] = {}  # rank -> the incarnation whose memory holds its state
        self.gate = 0
        self.gate_open = False
        self.last = -1
        self.owed: list[int] = []  # generations to answer with GateClosed
        self.deadlines: dict[str, int] = {}
        self.starting: list[str] = []
        self.old: list[ev.Event] = []
        self.over: int | None = None
        self.ending = False  # every worker leaves as soon as it can
        self.quarantine: set[str] = set()
        self.probes: list[str] = []
        if run.devices:
            self.quarantine |= set(run.quarantined)
            self.send(ev.Devices(self.run.t, run.devices, run.quarantined))
        self.send(ev.Begin(self.run.t))
        while warm and not self.run.state.armed and not self.run.state.waiting and self.over is None:
            self.everyone_walks()

    # ---- the agent ---------------------------------------------------------------------------------------------------

    def send(self, event: ev.Event) -> None:
        before = self.run.state
        actions = self.run.send(event)
        self.old.append(event)
        assert self.run.state.generation >= before.generation
        assert self.run.state.next_worker >= before.next_worker
        if before.phase in m.OVER and not isinstance(event, ev.Signalled):
            assert actions == ()
        for action in actions:
            getattr(self, f"do_{type(action).__name__.lower()}")(action)

    def do_spawn(self, order: ev.Spawn) -> None:
        if order.worker in self.processes:  # asked twice
            assert self.processes[order.worker].rank == order.rank
            assert not self.processes[order.worker].fenced
            return
        assert order.worker == len(self.processes), "cells are taken in order, once"
        if order.rank is not None:
            assert self.places[order.rank] == order.worker, "published before it is started"
        process = Process(order.worker, order.rank, world=self.run.state.generation)
        if order.rank is not None and self.published is not None and self.published.fresh:
            process.holds = True
        self.processes[order.worker] = process

    def do_fence(self, order: ev.Fence) -> None:
        process = self.processes[order.worker]
        process.alive, process.fenced = False, True

    def do_dismiss(self, order: ev.Dismiss) -> None:
        process = self.processes[order.worker]
        assert process.alive or process.dying
        process.told = True

    def do_closegate(self, order: ev.CloseGate) -> None:
        assert order.generation >= self.gate
        assert order.generation == self.run.state.generation
        self.gate, self.gate_open = order.generation, False
        self.owed.append(order.generation)

    def do_resetgate(self, order: ev.ResetGate) -> None:
        assert order.generation > self.gate
        for process in self.processes.values():
            assert not process.alive, "the old world is fenced first"
        self.gate, self.gate_open, self.last = order.generation, True, -1
        self.memory.clear()

    def do_opengate(self, order: ev.OpenGate) -> None:
        assert order.generation == self.gate
        for cell in self.places:
            process = self.processes[cell]
            assert process.through or (process.stage_of == self.gate and process.stage >= STAGES.index("restored"))
        self.gate_open = True

    def do_publish(self, order: ev.Publish) -> None:
        assert len(order.workers) == self.run.config.nproc
        assert len(set(order.workers)) == len(order.workers)
        assert len(order.replaced) == len(order.lost)
        assert order.generation > (self.published.generation if self.published else 0)
        self.places, self.published = order.workers, order
        device = self.run.state.device
        for rank in range(len(device)) if order.fresh else order.replaced if device else ():
            assert device[rank] not in self.quarantine, "a rank got a device in quarantine"
        assert len(set(device)) == len(device), "two ranks share a device"
        assert not device or (order.devices or self.run.devices[: len(device)]) == device
        assert not self.quarantine & set(order.devices) or order.replaced
        for rank, cell in enumerate(order.workers):
            process = self.processes.get(cell)
            if process is not None:
                assert not process.fenced, "a dead worker holds a rank"
                assert process.rank in (None, rank)
                process.rank, process.world = rank, order.generation
            if order.fresh:
                if process is not None:
                    process.holds = True
                self.memory[rank] = cell
            elif rank in order.replaced:
                assert order.lost[order.replaced.index(rank)] == self.memory[rank], "whose memory has the state"
                assert process is None or not process.holds
            else:
                assert self.memory[rank] == cell, "a rank without its state must be restored"
        if order.fresh:
            assert order.resume == 0
            assert order.replaced == ()
        elif order.tail:
            assert order.resume == -1
        else:
            assert order.generation == self.gate
            if order.rollback:
                assert 0 <= order.resume <= self.last + 1
                self.last = order.resume - 1
            assert order.resume == self.last + 1

    def do_deadline(self, order: ev.Deadline) -> None:
        assert order.seconds > 0
        self.deadlines[order.name] = order.generation

    def do_startservice(self, order: ev.StartService) -> None:
        self.starting.append(order.service)

    def do_quarantine(self, order: ev.Quarantine) -> None:
        assert order.device not in self.quarantine, "told twice"
        self.quarantine.add(order.device)

    def do_probe(self, order: ev.Probe) -> None:
        self.probes.append(order.device)

    def do_say(self, order: ev.Say) -> None:
        says((order,))

    def do_terminate(self, order: ev.Terminate) -> None:
        assert self.run.state.phase in m.OVER

    def do_end(self, order: ev.End) -> None:
        assert self.run.state.phase in m.OVER
        assert self.over in (None, order.code)
        self.over = order.code

    # ---- workers -----------------------------------------------------------------------------------------------------

    def walking(self) -> list[Process]:
        """Live processes that have something to do next."""
        return [p for p in self.processes.values() if p.alive and self.next_event(p) is not None]

    def next_event(self, process: Process, jump: int = 0) -> ev.Event | None:
        t, cell = self.run.t, process.cell
        if process.finished:
            return None
        if process.told:
            return ev.Died(t, cell, "SIGTERM", 143)
        if not process.started:
            return ev.Started(t, cell)
        if process.rank is None:
            return None if process.parked else ev.Parked(t, cell)
        if process.holds and not process.protected:
            return ev.Protected(t, cell)
        if process.through:
            return ev.Finished(t, cell) if process.leaving else None
        assert self.published is not None
        known = max(process.world, self.gate) if process.holds else process.world
        if known > 1 and not (self.published.fresh and known == self.published.generation):
            stage = min((process.stage if process.stage_of == known else -1) + 1 + jump, len(STAGES) - 1)
            while stage > self.allowed(process, known):
                stage -= 1
            if process.stage_of != known or stage > process.stage:
                return ev.Stage(t, cell, known, STAGES[stage]) if stage >= 0 else None
        if self.run.state.armed and self.gate_open and process.holds and process.leaving:
            return ev.LoopDone(t, cell)
        return None

    def allowed(self, process: Process, generation: int) -> int:
        """The last stage that a worker may answer now."""
        if self.published is None or process.world < generation:
            return STAGES.index("cleaned")
        if self.published.tail:
            return STAGES.index("restored") if generation == self.published.generation else -1
        everyone = all(c in self.processes and self.processes[c].started for c in self.places)
        return len(STAGES) - 1 if self.gate_open else STAGES.index("restored" if everyone else "cleaned")

    def walk(self, process: Process, jump: int = 0) -> None:
        event = self.next_event(process, jump)
        assert event is not None
        if isinstance(event, ev.Started):
            process.started = True
        elif isinstance(event, ev.Parked):
            process.parked = True
        elif isinstance(event, ev.Protected):
            process.protected = True
        elif isinstance(event, ev.LoopDone):
            process.loop_done = True
            process.leaving = self.ending
        elif isinstance(event, ev.Died):
            process.alive = False
        elif isinstance(event, ev.Finished):
            process.finished, process.alive = True, False
        elif isinstance(event, ev.Stage):
            process.stage, process.stage_of = STAGES.index(event.stage), event.generation
            if event.stage == "first_done":
                self.last += 1
            # An answer that a newer generation overtook is not heard: the rank is then restored once more.
            heard = event.generation == self.run.state.generation
            if heard and process.rank is not None and process.stage >= STAGES.index("restored"):
                process.holds = True
                self.memory[process.rank] = process.cell
        self.send(event)

    def everyone_walks(self) -> None:
        for process in self.walking():
            if process.alive and self.next_event(process) is not None:  # an earlier one may have changed that
                self.walk(process)

    def answer_gate(self, index: int) -> None:
        generation = self.owed.pop(index)
        self.send(ev.GateClosed(self.run.t, generation, self.last))

    # ---- faults ------------------------------------------------------------------------------------------------------

    def alive(self) -> list[Process]:
        return [p for p in self.processes.values() if p.alive]

    def looping(self) -> list[Process]:
        return [p for p in self.alive() if p.protected and not p.through and not p.told]

    def staying(self) -> list[Process]:
        return [p for p in self.alive() if p.protected and not p.leaving and not p.told]

    def die(self, process: Process, code: int | None = 137, signature: str = "") -> None:
        process.alive = process.dying = False
        done = process.loop_done
        self.send(ev.Died(self.run.t, process.cell, "died", code, self.last, "", signature, done))

    def begin_to_die(self, process: Process) -> None:
        """Its death is noticed; `die` says how it ended."""
        process.alive, process.dying = False, True
        self.send(ev.Dying(self.run.t, process.cell))

    def dying(self) -> list[Process]:
        return [p for p in self.processes.values() if p.dying]

    def raise_in(self, process: Process, signature: str, *, known: bool) -> None:
        """Its body raises; `known` = the event says in which generation."""
        resumed = process.stage_of == self.gate and process.stage >= STAGES.index("resumed")
        generation = self.gate if resumed else max(1, min(process.world, self.gate - 1))
        self.send(ev.Raised(self.run.t, process.cell, self.last + 1, signature, generation if known else None))

    def connecting(self) -> list[Process]:
        """Workers of the newest world while it is being put together."""
        if self.published is None or self.gate_open or self.published.fresh or self.published.generation != self.gate:
            return []
        return [p for p in self.alive() if p.rank is not None and p.world == self.gate and p.started and not p.through]

    def cut_off(self, process: Process) -> None:
        """It cannot be connected with the others."""
        self.send(ev.Unconnected(self.run.t, process.cell, self.gate, Fault.LINK.value, "closed by peer"))

    def waited_for(self) -> tuple[int, ...]:
        """Cells of those whom the repair waits for."""
        return () if self.over is not None else tuple(w.cell for w in incidents.awaited(self.run.state))

    def stall(self) -> None:
        """None of them makes progress."""
        self.send(ev.Stalled(self.run.t, self.run.state.generation, self.waited_for(), 30.0))

    def expire(self, name: str) -> None:
        self.send(ev.Expired(self.run.t, name, self.deadlines.pop(name)))

    def refuse(self, rank: int, back: int | None = None) -> None:
        """The new holder of a replaced rank finds no source, but for a snapshot `back` steps ago."""
        process = self.processes.get(self.places[rank])
        if process is not None and process.alive:
            snapshot = -1 if back is None else max(0, self.last - back)
            self.send(ev.Unrestorable(self.run.t, process.cell, process.world, "no replica", snapshot))

    def users(self, device: str) -> tuple[int, ...]:
        """The living worker of the rank that has the device."""
        state = self.run.state
        ranks = [rank for rank, mine in enumerate(state.device) if mine == device]
        cells = [cell for rank in ranks if (cell := state.holder[rank]) is not None]
        return tuple(cell for cell in cells if cell in self.processes and self.processes[cell].alive)

    def fail_device(self, device: str, fault: str, code: int, recovery: int, *, used: bool = True) -> None:
        users = self.users(device) if used else ()
        step = self.last + 1
        self.send(ev.DeviceFault(self.run.t, fault, (device,), users, (), code, recovery, step))

    def answer_probe(self, ok: bool) -> None:
        device = self.probes.pop(0)
        self.send(ev.Probed(self.run.t, device, ok, self.users(device), "" if ok else "no answer"))

    def heal(self, device: str) -> None:
        self.quarantine.discard(device)
        self.send(ev.DeviceBack(self.run.t, device))

    def kill_service(self, service: str) -> None:
        self.starting = [s for s in self.starting if s != service]
        self.send(ev.ServiceDied(self.run.t, service))

    def service_ready(self) -> None:
        self.send(ev.ServiceReady(self.run.t, self.starting.pop(0)))

    def again(self, event: ev.Event) -> None:
        """Late messages about dead workers and old generations change nothing."""
        worker = getattr(event, "worker", None)
        gone = worker is not None and self.run.state.worker(worker) is None
        generation = getattr(event, "generation", None)
        old = generation is not None and generation < self.run.state.generation
        if gone or (isinstance(event, (ev.GateClosed, ev.Expired)) and old):
            before = self.run.state
            assert self.run.send(event) == ()
            assert self.run.state == before

    # ---- what always holds -------------------------------------------------------------------------------------------

    def the_state_fits_the_world(self) -> None:
        state = self.run.state
        if state.phase in m.OVER:
            assert self.over == state.exit_code is not None
            return
        assert self.over is None
        for worker in state.workers:
            process = self.processes[worker.cell]
            assert process.alive or process.finished or process.dying, "a dead worker is remembered as alive"
            assert worker.rank == process.rank
        held = [c for c in state.holder if c is not None]
        assert sorted(held) == [w.cell for w in state.workers if w.rank is not None]
        if state.phase not in (RunPhase.STOPPING, RunPhase.RESTARTING):
            assert None not in state.holder
        assert len(state.spares()) <= self.run.config.spares
        for rank, cell in enumerate(state.lost):
            if cell is not None:
                assert self.processes[cell].fenced, "adopted memory of a worker that may still write"
                assert self.memory[rank] == cell
        for process in self.processes.values():
            if process.alive:
                assert process.told or state.worker(process.cell) is not None, "a live worker is forgotten"

    def somebody_is_waited_for(self) -> None:
        """Unless it is quiet there is always a deadline or an answer that must come."""
        state = self.run.state
        waits = {RunPhase.STARTING: "start", RunPhase.RESTARTING: "backoff"}
        if state.phase is RunPhase.RESTARTING:
            backoff = waits[state.phase] in self.deadlines or not state.backoff_over
            assert self.starting or state.leaving or backoff or state.waiting
            assert not state.leaving or "leave" in self.deadlines
        elif state.phase is RunPhase.STOPPING and not state.waiting:
            assert state.generation in self.owed or any(w.dying for w in state.workers)
        elif state.phase is RunPhase.REPAIRING:
            assert self.waited_for(), "whom the launcher looks at, and gives up in the end"

    def finish(self) -> None:
        """No more faults: everything that is owed comes, and the run ends."""
        self.ending = True
        for _ in range(400):
            if self.over is not None:
                break
            for process in self.processes.values():
                process.leaving = True
            while self.starting:
                self.service_ready()
            while self.owed:
                self.answer_gate(0)
            for process in self.dying():
                self.die(process)
            if self.run.state.waiting:
                for device in sorted(self.quarantine):
                    self.heal(device)
            walking = bool(self.walking())
            self.everyone_walks()
            self.the_state_fits_the_world()
            if not walking and not self.starting and not self.owed and self.over is None:
                assert self.deadlines, f"stuck in {self.run.state.phase}"
                self.expire(next(iter(self.deadlines)))
        assert self.over is not None, f"does not end: {self.run.state}"
        assert replay(self.run.journal) == []
