"""One step of the loop: `with step:` is the body, and everything that can go wrong in it is handled on the way out.

The order of writes at its end is the protocol. At the gate: GATE slot, then arrival, then (once the gate is open) the memory
is opened and the update begins. After the update: END slot, then seal, then DONE.
"""

from __future__ import annotations

import os
import signal
import time
from types import TracebackType
from typing import Any

import torch

from ftrun.core import symptoms
from ftrun.core.errors import UsageError
from ftrun.core.faults import Fault
from ftrun.core.shared.board import Busy, F, Head, Inexact, Phase
from ftrun.worker.recovery.kit import Kit
from ftrun.worker.recovery.survivor import WORLD, Survivor
from ftrun.worker.runtime import crash_points
from ftrun.worker.runtime.exception_report import final_code, report_exception
from ftrun.worker.runtime.position import Interrupt, Where
from ftrun.worker.runtime.torch_private import swallowed_in_backward, writes_to
from ftrun.worker.state.logged_values import LoggedValues
from ftrun.worker.step.calls import Calls, restore_modes, thread_modes
from ftrun.worker.step.gate import Gate


class Step:
    """Handed out by `Job.steps` and `Job.batches`.

    `index`: the step, from 0; with `job.epochs` and `job.batches` it begins anew in each epoch. `number`: how many
    steps of this run, in all its loops, come before it (those before a checkpoint are of another run). `attempt`: how often it was
    done again. `committed`: the update of this step is part of the model (test it in code after the `with`). `generation`: of the
    world it ran in. `logged`: after the `with`, what `job.log` was given in it, as means over all ranks.
    """

    def __init__(self, index: int, number: int, body: Body | None = None) -> None:
        self.index = index
        self.number = number
        self.attempt = body.position.attempt if body else 0
        self._committed = False
        self.logged: dict[str, float] = {}
        self.let_out = False  # an exception left the body: nobody may go on from here
        self.entered = False
        self._inside = False
        self._body = body
        self.alone: LoggedValues | None = None  # outside ftrun
        self._modes: tuple[Any, ...] = ()

    @property
    def committed(self) -> bool:
        """Is the update of this step part of the model? Known after the `with`. Errors: UsageError inside it."""
        if self._inside:
            raise UsageError(
                f"step.committed inside the body of step {self.index}: it is known after the `with step:`, test it there"
            )
        return self._committed

    @property
    def generation(self) -> int:
        """Number of the world this step runs in; 0 outside ftrun."""
        return self._body.kit.context.generation if self._body else 0

    def __enter__(self) -> Step:
        if self.entered:
            raise UsageError(f"step {self.index} was entered twice; take a new one from the loop")
        self.entered = self._inside = True
        body = self._body
        if body is None:
            if self.alone is not None:
                self.alone.forget()
            return self
        if body.position.in_body:
            inside = body.position.index_of(body.position.number)
            raise UsageError(f"`with step` inside the body of step {inside}; bodies do not nest")
        self._modes = thread_modes()
        body.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        body, self._inside = self._body, False
        swallowed = swallowed_in_backward(error)
        if body is None:
            self._committed = kind is None
            if self.alone is not None and kind is None:
                self.alone.gather(self.index, step=self.index)
                self.logged = self.alone.of(self.index)
            return False
        self.let_out = True  # also what `_leave` raises leaves the body
        aborted = self._leave(body, swallowed or error)
        self.let_out = error is not None and not aborted
        if not self.let_out:
            body.position.where = Where.LEFT
            return aborted
        body.kit.context.leaves()
        if swallowed is not None:
            raise swallowed.with_traceback(trace) from None
        return False

    def _leave(self, body: Body, error: BaseException | None) -> bool:
        """End the body. True: it was aborted, and the step is done again. Raises what a gate or an update raised."""
        try:
            if body.position.where is Where.BODY:  # else the gate has seen to it
                body.position.forbid_interrupts()
            if error is None:
                if body.position.where is Where.BODY:
                    body.pass_gate()
                body.complete()
                self._committed = True
                self.logged = body.kit.logged.of(body.position.number)
                return False
            if why := body.kit.state.why_not_resized(error):
                raise UsageError(why) from error
        except Interrupt as interrupt:
            error = interrupt
        except Exception as failure:
            body.leave()
            report_exception(body.kit.context, failure, "body")
            raise
        restore_modes(self._modes)
        if isinstance(error, Interrupt) and body.position.where is Where.PASSED:
            # the update is half done and cannot be undone: a replacement takes it from a replica
            os.kill(os.getpid(), signal.SIGKILL)
        aborted = isinstance(error, Interrupt) or (isinstance(error, Exception) and body.raised(error))
        body.leave()
        return aborted


class Body:
    """What happens between the two ends of `with step`."""

    def __init__(self, kit: Kit, gate: Gate, calls: Calls, survivor: Survivor) -> None:
        self.kit = kit
        self.position = kit.position
        self._gate = gate
        self._calls = calls
        self._survivor = survivor
        self._words = kit.context.cell.words()
        self._forward = False  # a protected model was called in this body
        self._updates = False  # a protected optimizer updates in this body
        self._carry = False  # gradients live on over optimizer steps
        self._marks: list[tuple[int, int]] | None = None  # of the gradients that the body found
        self._grads: list[torch.Tensor | None] = []

    def begin(self) -> None:
        """Enter the body."""
        kit, context, number = self.kit, self.kit.context, self.position.number
        self.position.where = Where.LOOP
        # after a job.call the others may have to repeat it with us, or all go back to an earlier step: then the first
        # collective (or the gate) hands the iteration out again
        while context.stop_pending() and not self._calls.made:
            if self._survivor.rejoin_at(number) is None:
                break
        self._forward = self._updates = False
        kit.logged.forget()
        self.position.enter_body()
        context.phase(Phase.FORWARD)
        self._marks = self._marked() if any(kit.ledger.alive) and not self._carry else None
        self._survivor.step_begins()
        kit.observers.body_started()

    def _marked(self) -> list[tuple[int, int]]:
        return [(id(g), writes_to(g)) if g is not None else (0, 0) for g in self.kit.state.grads()]

    def model_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A protected model is called."""
        self.kit.context.progress()
        if self.position.where is Where.BODY:
            self.kit.observers.model_called(args, kwargs)
            self._forward_starts()

    def _forward_starts(self) -> None:
        if not self._forward:
            self._forward = True
            self.kit.observers.forward_started()

    def backward_started(self) -> None:
        """The first gradient of a body is about to be computed."""
        if self.position.where is not Where.BODY or self._words[F.PHASE] == Phase.BACKWARD:
            return
        self.kit.context.phase(Phase.BACKWARD)
        if self._marks is not None:
            if any(a == b and a[0] for a, b in zip(self._marks, self._marked(), strict=True)):
                self._carry = True  # the script goes on accumulating after an update
                self.kit.ledger.late(self.position.number)
            self._marks = None
        self.kit.observers.backward_started()

    def update_begins(self, optimizer: Any, bare: bool = True) -> None:
        """A protected optimizer is about to update: the first one in a body arrives at the gate. Errors: UsageError.

        `bare`: its `step()` was called without arguments.
        """
        if not self.position.in_body:
            raise UsageError("optimizer.step() of a protected optimizer outside `with step:`")
        if self.position.where is Where.BODY:
            self.pass_gate(optimizer)
            self._updates = True
        self.kit.ledger.region.update_begins(optimizer, bare)

    def update_done(self) -> None:
        """A protected optimizer has stepped."""
        self.kit.ledger.region.update_done()

    def pass_gate(self, optimizer: Any = None) -> None:
        """Arrive and go on into the update of `optimizer`; without one the body ends here.

        Raises Interrupt when the world was stopped before the gate opened, and what an observer finds wrong.
        """
        kit, context, number = self.kit, self.kit.context, self.position.number
        self._forward_starts()  # if the body called no protected model
        self.position.forbid_interrupts()
        context.phase(Phase.GATE)
        kit.registry.settle()
        kit.state.finish_device(context.stop_pending)
        if context.stop_pending():
            raise Interrupt  # gradients may be garbage: collectives are completed when the world stops
        kit.registry.check()
        epoch = context.cell[F.EPOCH]
        kit.logged.gather(number, **({"epoch": epoch - 1} if epoch else {}), step=self.position.index_of(number))
        # kept until the body ends: the optimizer is about to ask for them too, and asking makes them anew
        grads = self._grads = kit.state.grads()
        kit.observers.gate_reached(number, optimizer, grads)
        kit.ledger.gate(number, optimizer is None or self._carry, grads, optimizer)
        if crash_points.armed:
            crash_points.point("slot-gate", number, context.rank)
        if not self._gate.arrive(number):
            raise Interrupt
        self.position.where = Where.PASSED
        kit.observers.gate_passed(number)
        kit.state.arena.open()
        if crash_points.armed:
            crash_points.point("open", number, context.rank)
        context.phase(Phase.UPDATE)
        kit.observers.update_started(number)

    def complete(self) -> None:
        """The body was left after its gate: seal what it did."""
        kit, context, number = self.kit, self.kit.context, self.position.number
        kit.ledger.updated = self._updates
        self._grads = []
        kit.ledger.region.ended()
        if kit.ledger.region.hidden and context.board[Head.MADE]:
            context.note_inexact(Inexact.UPDATE_DOUBTED)
        kit.state.absorb()
        if kit.reducers.commit(number):
            kit.state.manifest.facts["reducers"] = kit.reducers.facts()
            kit.state.arena.write_manifest(kit.state.manifest)
        kit.ledger.end(number + 1, accumulating=not self._updates or self._carry)
        if crash_points.armed:
            crash_points.point("slot-end", number, context.rank)
        kit.state.arena.sealed(number + 1)
        if crash_points.armed:
            crash_points.point("sealed", number, context.rank)
        kit.observers.step_done(number)
        context.phase(Phase.DONE)
        if self._words[F.BUSY] & Busy.FIRST:
            context.busy(Busy.FIRST, False)
        self.position.leave_body()
        if crash_points.armed:
            crash_points.point("done", number, context.rank)
        if context.stop_pending():
            context.board.ring_workers()  # a replacement may wait for this seal
        self._survivor.step_done(number)
        kit.logged.write()
        kit.snapshots.take_if_due(number + 1)

    def leave(self) -> None:
        """The body was aborted, or raised."""
        self._grads = []
        self.position.raised_after_gate = self.position.where is Where.PASSED
        self.position.leave_body()

    def raised(self, error: Exception) -> bool:
        """A body raised. True = the world redoes the step (the exception was reported); False = let it out."""
        context, passed = self.kit.context, self.position.where is Where.PASSED
        if context.stop_pending() and not passed:
            return True  # a consequence of the stop: whatever failed was cut off
        self.position.forbid_interrupts()
        report_exception(context, error, "body")
        if passed or final_code(error) or symptoms.of_exception(error) is Fault.CUDA:
            return False  # after a CUDA error nothing works in this process: it ends, and is replaced
        context.cell[F.RAISED_NS] = time.monotonic_ns()
        context.cell[F.RAISED] = context.generation
        context.board.ring_launcher()
        try:
            context.wait_until(lambda: bool(context.board[Head.ENDING]), WORLD)
        except Interrupt:
            return True
        return False
