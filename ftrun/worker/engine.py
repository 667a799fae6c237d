"""One rank's protected run: the gate, the slots, leaving a stopped world and joining the next one.

Everything here runs in the script's main thread. The order of writes at a step's end is the protocol: END slot, then
seal, then DONE; at its gate: GATE slot, then arrival, then (once the gate is open) OPEN, then the update.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

from ftrun import native
from ftrun.core import gate, symptoms
from ftrun.core.board import Busy, Cell, F, Flag, Head, Inexact, Phase, Source
from ftrun.core.errors import UsageError, WorkerError
from ftrun.core.faults import Fault
from ftrun.worker import recorder
from ftrun.worker.calls import Calls
from ftrun.worker.groups import Registry
from ftrun.worker.kept.handover import Kept, use_gpu
from ftrun.worker.kept.ledger import Ledger
from ftrun.worker.kept.recovery_points import START, Slots
from ftrun.worker.lookout import LEARNED, Lookout
from ftrun.worker.memory.arena import Arena, Manifest
from ftrun.worker.reducer import Reducers
from ftrun.worker.rejoin import WORLD, Rejoining
from ftrun.worker.runtime import crash_points
from ftrun.worker.runtime.exception_report import final_code, report_exception
from ftrun.worker.runtime.run_link import Context, Interrupt
from ftrun.worker.runtime.torch_private import writes_to
from ftrun.worker.snapshot import Snapshots
from ftrun.worker.state.protected_state import Protected
from ftrun.worker.strikes import trigger_of
from ftrun.worker.vigil import Vigil

_PATIENCE = 0.1  # seconds that a rank which is done with it waits for the others
_GATE_LOOK = 0.1  # seconds between two looks at the gate when no bell rings
_GUARDED = 3  # first steps in which hidden updates are looked for; then every 100th


class Engine:
    """Created by protect(); lives as long as the process."""

    def __init__(self, context: Context, registry: Registry, state: Protected) -> None:
        self.context = context
        self.registry = registry
        self.state = state
        self.reducers = Reducers(state.modules, registry)
        self.base = 0  # gate number of the current loop's first step
        self.first = 0  # its step index
        self.step = -1  # gate number handed out last
        self.attempt = 0
        self.resume = -1  # where a replacement starts; -1 = not a replacement
        self.inexact = Inexact(0)
        self.current: Any = None  # the Step whose body runs
        self._kept: Kept | None = None
        self.ledger = Ledger(state)
        self.passed = False
        self.carry = False  # gradients live on over optimizer steps
        self._marks: list[tuple[int, int]] | None = None
        self._restart: dict[str, Any] | None = None  # state to apply at the next hand-out
        self._guard = 0
        self._grads: list[Any] = []
        self.calls = Calls(self)
        rejoining = Rejoining(self)
        self.rejoin, self.rejoin_at = rejoining.rejoin, rejoining.rejoin_at
        self.snapshots = Snapshots(self, context.snapshot_every)
        self.went_back = 0  # generation in which the state was last taken from the host snapshot
        self.entered = False  # the body of the step handed out last was entered
        self._fired_forward = False
        self._seen_steps = 0
        self._guarding = True  # hidden updates are looked for in this step
        self._words = context.cell.words()
        self._arrival = context.cell.field_address(F.ARRIVAL)
        self._arrivals: Any = None  # that of every rank
        self.redo: tuple[int, int] | None = None  # (generation, resume) whose first new step is not done yet
        self.vigil = registry.vigil = Vigil(self, context.nonfinite, context.check_replicas)
        self._recovered = False  # since the step handed out last: what could wait is still to be done
        self._trigger = trigger_of(self)
        self.lookout = Lookout(context)
        context.on_fd_store = self.send_descriptors
        self._recorder = recorder.of(self)

    # -- set-up ------------------------------------------------------------------------------------------------------

    def start_fresh(self) -> None:
        """First incarnation of a rank: lay everything out and seal it for step 0."""
        rank = self.context.rank
        arena = Arena.create(rank, max(self.state.bytes_now(), 1), use_gpu(self.context, self.state))
        self.ledger.slots = Slots.create(rank)
        self.state.move_in(arena)
        self.reducers.record()
        self.ledger.end(0, accumulating=False)
        arena.sealed(0)
        self.send_descriptors()

    def resume_with(self, resume: int, restart: dict[str, Any]) -> None:
        """A replacement: the arena is attached; `restart` is applied when the first step is handed out."""
        self.resume = resume
        self._restart = restart
        self.ledger.loader_state = restart.get("loader")
        if self.ledger.slots.tag(START) == resume:
            self.attempt = 1
        self.vigil.inherit()
        if crash_points.armed:
            crash_points.point("restored", resume, self.context.rank)

    def use_snapshot(self, manifest: Manifest, restart: dict[str, Any], moved: int) -> None:
        """Arena and slots hold the host snapshot, and the state lies over them: what else must go back with it."""
        context = self.context
        self.went_back = context.generation
        self.attempt = 1
        self.reducers.load(manifest.facts.get("reducers"))
        self.state.apply_python_state(restart["py"])
        self.ledger.new_loop()
        context.cell[F.SOURCE_BYTES] = moved
        context.cell[F.SOURCE] = Source.SNAPSHOT

    def go_on_with(self, resume: int, restart: dict[str, Any]) -> None:
        """A survivor that went back: `restart` is applied when step `resume` is handed out."""
        self.step = resume - 1
        self._restart = restart

    def reload(self, step: int) -> None:
        """A checkpoint was loaded before the loop, which goes on at step index `step`."""
        arena = self.state.arena
        arena.open()
        self.state.manifest.facts["loaded"] = step
        self.state.repoint()
        self.ledger.end(0, accumulating=False)
        arena.sealed(0)

    def loop_is_over(self, first: int, length: int) -> bool:
        """Start a loop of `length` steps. True: a replacement came too late for it (its predecessor had left it)."""
        self._recorder.loop(first, length)
        if self.resume > self.base + length:
            self.base += length + 1
            self.registry.between = True
            if self.resume == self.base and self.ledger.slots.tag(START) != self.resume:
                self.apply_restart(self.base)  # the script goes on from here, if need be with another loop
            return True
        self.first = first
        self.context.cell.set_shift(first - self.base)
        return False

    def index_of(self, number: int) -> int:
        """Step index of a gate number of the current loop."""
        return self.first + number - self.base

    def enter_loop(self) -> int:
        """Gate number at which this rank's loop starts."""
        self.registry.between = False
        self.ledger.new_loop()
        if self.resume < 0:
            self.join_world()
            self._await_protected()
            return self.base
        world = self.context.world
        if world is not None and world.tail:
            os.kill(os.getpid(), signal.SIGKILL)  # the others are in this loop after all: come back as an incident
        number = self.rejoin(rewind=False)
        self.resume = -1
        return number

    def _await_protected(self) -> None:
        """No first step before every rank can be recovered. Returns early when the world is stopped."""
        context = self.context
        world = context.world
        assert world is not None
        context.board.ring_workers()
        cells = [context.board.cell(p.cell) for p in world.places]
        try:
            while not context.wait_until(lambda: all(c.has(Flag.PROTECTED) for c in cells), 60.0):
                pass  # the launcher's start deadline ends a world that never gets there
        except Interrupt:
            pass

    def end_loop(self, end: int) -> bool:
        """The virtual gate after a loop: replicas stay until every rank got here. False = stopped first."""
        context = self.context
        self.apply_restart(end)
        self._recorder.start(self.index_of(end))
        self.context.phase(Phase.GATE)
        self.step = end
        self.context.cell[F.STEP] = self.index_of(end) + 1
        self._answer_resumed()
        # a step that updates nothing: what comes after it is what was before, and a replacement finds it sealed
        if not self.state.finish_device(context.stop_pending):
            return False
        self.ledger.gate(end, True, self.state.grads())
        if not self.arrive(end):
            return False
        self.ledger.end(end + 1, accumulating=True)
        self.state.arena.sealed(end + 1)
        context.board.ring_workers()  # a replacement may wait for this seal
        self._answer_first_done(end)
        self.base = end + 1
        self.registry.between = True
        self.context.phase(Phase.DONE)
        self.context.milestone(Flag.LOOP_DONE)
        return True

    def send_descriptors(self) -> bool:
        """Hand the memory to the fd store (again, when there is a new one). False = not now: call again."""
        if not self.state.laid_out:
            return False
        return self.keep().send() and self.snapshots.handed_over()

    def keep(self) -> Kept:
        """What the fd store is to hold of this rank; from here on it hears of each new allocation on a GPU."""
        if self._kept is None:
            self._kept = Kept(self.context, self.state, self.ledger)
        return self._kept

    def finish_recording(self) -> None:
        """The first step is about to be handed out: keep the results of the collectives before it."""
        if self.registry.looping:
            return
        self.registry.looping = True
        if not self.registry.recorder.replaying:
            self.ledger.recording(*self.registry.recorder.dump(len(self.registry.groups)))
            self.ledger.end(0, accumulating=False)  # what the script did since protect() counts
            self.snapshots.take_if_due(0)
        self.registry.recorder.replaying = False
        # from here on this rank can be replaced: before, its record of collectives was not complete
        self.context.milestone(Flag.PROTECTED | Flag.LOOPING)

    # -- the gate ----------------------------------------------------------------------------------------------------

    def join_world(self) -> None:
        """Look up every rank's cell of the current world, for the proof that all arrived."""
        world = self.context.world
        if world is None:
            raise WorkerError("no world")
        cells = [self.context.board.cell(p.cell) for p in world.places]
        self._arrivals = native.AddressList([c.field_address(F.ARRIVAL) for c in cells])

    def arrive(self, step: int) -> bool:
        """Arrive at a gate; True = passed, False = the world was stopped first."""
        context, board = self.context, self.context.board
        generation = context.generation
        wanted = gate.arrival(generation, step)
        complete = native.arrive(self._arrival, wanted, self._arrivals)
        if crash_points.armed:
            crash_points.point("arrive", step, context.rank)
        if complete:
            board.ring_gate()  # the last one sees all others: they wake up while it opens the gate
        self.fire("gate", step)
        while True:
            seen = board.gate_bell()
            raw = board.gate()
            verdict = gate.verdict(raw, generation, step)
            if verdict == gate.PASS:
                if crash_points.armed:
                    crash_points.point("pass", step, context.rank)
                return True
            if verdict == gate.STOPPED:
                return False
            if complete and not self.vigil.holds(step) and not (crash_points.armed and crash_points.leaves_gate(step, context.rank)):
                new = gate.opened(raw, generation, step, (wanted,))
                if new is not None:
                    if board.swap_gate(raw, new):
                        if crash_points.armed:
                            crash_points.point("swap", step, context.rank)
                        board.ring_gate()
                    continue
            board.wait_gate(seen, _GATE_LOOK)
            complete = native.all_equal64(self._arrivals, wanted)

    def fire(self, phase: str, step: int) -> None:
        """Let injected faults strike."""
        trigger = self._trigger
        if trigger.armed or self.context.board.requests() != trigger.heard:
            trigger.fire(phase, self.index_of(step), self.attempt)

    # -- a step ------------------------------------------------------------------------------------------------------

    def hand_out(self, step: int) -> None:
        """The loop is about to give `step` to the script: seal its START slot, or put back what it holds."""
        context, words = self.context, self._words
        if step == self.step:
            self.attempt += 1
            self._restart = self.ledger.start_state(step)
        elif self._restart is None:
            self.attempt = 0
        self.step = step
        self.entered = False
        self.calls.forget()
        self.registry.handed_out()
        words[F.ATTEMPT] = self.attempt
        words[F.STEP] = self.index_of(step) + 1
        if self._recovered:
            self._tidy_up()
        self.reducers.refuse_hooks()
        self.apply_restart(step)
        if self.ledger.loader is not None:
            self.ledger.loader.ensure(self.index_of(step))
        if self.ledger.slots.tag(START) != step:
            self.ledger.start(step)
            if crash_points.armed:
                crash_points.point("slot-start", step, context.rank)
        self._recorder.start(self.index_of(step))
        context.phase(Phase.IDLE)
        self.fire("idle", step)

    def _tidy_up(self) -> None:
        """Do what could wait once every rank is through with the interrupted step: they may share a processor."""
        self._recovered = False
        context, world = self.context, self.context.world
        if world is not None:
            cells, here = [context.board.cell(p.cell) for p in world.places], self._words[F.STEP]
            if self._all_at(cells, here):
                context.board.ring_workers()
            else:
                with suppress(Interrupt):
                    context.wait_until(lambda: self._all_at(cells, here), _PATIENCE)
        self.registry.destroy_retired()

    @staticmethod
    def _all_at(cells: list[Cell], step: int) -> bool:
        return all(cell[F.STEP] >= step for cell in cells)

    def outside_body(self, what: str) -> None:
        """Errors: UsageError when `what` is asked for inside a body."""
        if self.context.in_body:
            raise UsageError(f"{what} was asked for inside the body of step {self.index_of(self.step)}; leave it first")

    def apply_restart(self, step: int) -> None:
        """Put back what a slot holds, once."""
        if self._restart is not None:
            saved, self._restart = self._restart, None
            self.ledger.put_back(saved, self.index_of(step))

    def begin(self, step: int) -> None:
        """Enter the body."""
        context = self.context
        self.entered = True
        # after a job.call the others may have to repeat it with us, or all go back to an earlier step: then the first
        # collective (or the gate) hands the iteration out again
        while context.stop_pending() and not self.calls.made:
            if self.rejoin_at(step) is None:
                break
        self.passed = False
        self.registry.gate_passed = False
        with context.lock:
            context.in_body = True
            context.interruptible = True
        context.phase(Phase.FORWARD)
        self._marks = None
        if any(self.ledger.alive) and not self.carry:
            self._marks = [(id(g), writes_to(g)) if g is not None else (0, 0) for g in self.state.grads()]
        if self.redo is not None:
            self._answer_resumed()
        self.vigil.body_began()
        self._seen_steps += 1
        self._guarding = self._seen_steps <= _GUARDED or self._seen_steps % 100 == 0
        self._guard = self.state.params_checksum() if self._guarding else 0
        if self._seen_steps <= LEARNED:
            self.lookout.body_begins(self._seen_steps)
        self._fired_forward = False

    def forward_started(self) -> None:
        """The model is called."""
        self.context.progress()
        if self.context.in_body and not self._fired_forward:
            self._fired_forward = True
            self.fire("forward", self.step)

    def backward_started(self) -> None:
        """The first gradient of a body is about to be computed."""
        if not self.context.in_body or self.passed or self._words[F.PHASE] == Phase.BACKWARD:
            return
        self.context.phase(Phase.BACKWARD)
        if self._marks is not None:
            now = [(id(g), writes_to(g)) if g is not None else (0, 0) for g in self.state.grads()]
            if any(a == b and a[0] for a, b in zip(self._marks, now, strict=True)):
                self.carry = True  # the script goes on accumulating after an update
                self.ledger.late(self.step)
            self._marks = None
        self.fire("backward", self.step)

    def pass_gate(self, step: int, optimizer: Any = None) -> None:
        """Arrive and go on into the update of `optimizer`; without one the body ends here.

        Raises Interrupt when the world was stopped before the gate opened. Errors: NonFiniteError.
        """
        updating = optimizer is not None
        context = self.context
        if not self._fired_forward:
            self.forward_started()  # the body called no protected model
        context.forbid_interrupts()
        context.phase(Phase.GATE)
        self.registry.settle()
        self.state.finish_device(context.stop_pending)
        if context.stop_pending():
            raise Interrupt  # gradients may be garbage: collectives are completed when the world stops
        # after the device is done: reading there would wait for a collective that waits for a dead peer, and not wake
        if self._guarding and self._guard != self.state.params_checksum():
            raise UsageError(
                "parameters changed between the start of the step and its gate: they were written by something that "
                "ftrun cannot see (an optimizer inside backward, a CUDA graph, .data); update through a protected optimizer"
            )
        self.registry.check()
        # kept until the body ends: the optimizer is about to ask for them too, and asking makes them anew
        grads = self._grads = self.state.grads()
        self.vigil.arriving(step, optimizer, grads)
        self.ledger.gate(step, not updating or self.carry, grads)
        if crash_points.armed:
            crash_points.point("slot-gate", step, context.rank)
        if not self.arrive(step):
            raise Interrupt
        self.passed = True
        self.registry.gate_passed = True
        self.vigil.passed()
        self._recorder.gate(self.index_of(step))
        self.state.arena.open()
        if crash_points.armed:
            crash_points.point("open", step, context.rank)
        context.phase(Phase.UPDATE)
        self.fire("update", step)

    def complete(self, step: int, updated: bool) -> None:
        """The body was left after its gate: seal what it did."""
        context = self.context
        self.ledger.updated = updated
        self._grads = []
        self.state.absorb()
        if self.reducers.commit(step):
            self.state.manifest.facts["reducers"] = self.reducers.facts()
            self.state.arena.write_manifest(self.state.manifest)
        self.ledger.end(step + 1, accumulating=not updated or self.carry)
        if crash_points.armed:
            crash_points.point("slot-end", step, context.rank)
        self.state.arena.sealed(step + 1)
        if crash_points.armed:
            crash_points.point("sealed", step, context.rank)
        self.ledger.body_complete(look=self._guarding)
        context.phase(Phase.DONE)
        if self._words[F.BUSY] & Busy.FIRST:
            context.busy(Busy.FIRST, False)
        with context.lock:
            context.in_body = False
        if crash_points.armed:
            crash_points.point("done", step, context.rank)
        self.registry.gate_passed = False
        if context.stop_pending():
            context.board.ring_workers()  # a replacement may wait for this seal
        if self.redo is not None:
            self._answer_first_done(step)
        self.snapshots.take_if_due(step + 1)

    def _answer_resumed(self) -> None:
        if self.redo is not None and self.context.cell[F.RESUMED] < self.redo[0]:
            self.context.answer(F.RESUMED, self.redo[0])

    def _answer_first_done(self, step: int) -> None:
        if self.redo is not None and step >= self.redo[1]:
            self.context.cell[F.REDONE_NS] = time.monotonic_ns()
            self.context.answer(F.FIRST_DONE, self.redo[0])
            self.redo = None
            self._recovered = True

    def leave(self) -> None:
        """The body was aborted."""
        self._grads = []
        with self.context.lock:
            self.context.in_body = False
        self.registry.gate_passed = False

    # -- a user's exception ------------------------------------------------------------------------------------------

    def raised(self, error: BaseException) -> bool:
        """A body raised. True = the world redoes the step (the exception was reported); False = let it out."""
        context = self.context
        if context.stop_pending() and not self.passed:
            return True  # a consequence of the stop: whatever failed was cut off
        context.forbid_interrupts()
        report_exception(context, error, "body")
        if self.passed or final_code(error) or symptoms.of_exception(error) is Fault.CUDA:
            return False  # after a CUDA error nothing works in this process: it ends, and is replaced
        context.cell[F.RAISED_NS] = time.monotonic_ns()
        context.cell[F.RAISED] = context.generation
        context.board.ring_launcher()
        try:
            context.wait_until(lambda: bool(context.board[Head.ENDING]), WORLD)
        except Interrupt:
            return True
        return False

    def note_inexact(self, why: Inexact) -> None:
        self.inexact |= why
        self.context.cell[F.INEXACT] = int(self.inexact)
