"""One step of the loop: `with step:` is the body, and its `__exit__` handles everything that can go wrong in it.

Theory of operation. `Position.where` says where the thread that trains is, and so how the body may end:

    HANDED_OUT   the loop handed the step out; the script may communicate only in `job.call`
    BODY         before the gate: a stop, an exception or a peer's death aborts the body, and the world does the step again
    PASSED       past the gate: this rank must finish the update, since others have begun theirs; ftrun refuses collectives
    LEFT         the body is over: the step is committed, or aborted and will be handed out again

The first `step()` of a protected optimizer carries the body from BODY to PASSED; a body without one passes its gate at its end.

How a stop gets into a body. The control thread sees the generation move and wakes whatever the thread waits in: it closes the
connections, and completes works that are still pending after 4 ms. Then calls of ftrun (a collective, the gate, a boundary of the
step) raise Interrupt in the thread that trains. It is a BaseException, so that `except Exception` in a script does not swallow it.
The control thread raises it asynchronously only if the script calls nothing of ftrun for half the stop timeout.

How an asynchronous one stays inside the body. The sender holds `Position.lock`, and so does the end of the body; `forbid_interrupts`
catches one that is on its way before the gate. A flag without the lock let 18 of 8,913 escape past the `with`; to take a pending one
back by the C API leaves the interpreter looking for asynchronous exceptions at every later bytecode.

What a body ends with:
- no exception: the rank passed the gate and updated, and `Commit.seal` makes the update part of the training;
- an Interrupt before the gate: nothing happened; the body restores the thread's modes (autocast, grad mode), and the loop rejoins;
- an Interrupt past the gate: half an update cannot be undone here. This process makes way, and a replacement takes a replica's state;
- an exception before the gate: the rank reports it, everyone does the step again once, and the same one a second time ends the run.
  After a CUDA error nothing works in this process: it ends, and the launcher replaces it;
- an exception past the gate: it leaves the script as under torchrun, since a replacement would never run the rest of the body.

commit.py says what a rank writes at its gate and at its end, and in which order. The body reads the gradients once, before the gate,
and holds them until it ends: each read of `grad` makes new Python objects for all of them, and the optimizer is about to read them.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch

from ftrun.core import symptoms
from ftrun.core.errors import UsageError
from ftrun.core.faults import Fault
from ftrun.core.shared.board import Busy, F, Head, Inexact, Phase
from ftrun.worker.link.exception_report import final_code, report_exception
from ftrun.worker.link.position import Again, Interrupt, Where
from ftrun.worker.repair.kit import Kit
from ftrun.worker.repair.survivor import WORLD, Survivor
from ftrun.worker.state.logged_values import LoggedValues
from ftrun.worker.step.calls import Calls, restore_modes, thread_modes
from ftrun.worker.step.commit import Commit
from ftrun.worker.torch_compat.sharded_private import local_of
from ftrun.worker.torch_compat.torch_private import swallowed_in_backward, write_count


class Step:
    """A step, as the loops of `Job` hand it out.

    `index`: the step, from 0; with `job.epochs` and `job.batches` it begins anew in each epoch. `number`: how many
    steps of this run, in all its loops, come before it (those before a checkpoint belong to another run). `attempt`: how often it was
    begun again. `committed`: the update of this step is part of the model (test it in code after the `with`). `generation`: number of
    the world it ran in. `logged`: after the `with`, the values that the script gave to `job.log`, as means over all ranks.
    """

    def __init__(self, index: int, number: int, body: Body | None = None) -> None:
        self.index = index
        self.number = number
        self.attempt = body.position.attempt if body else 0
        self.is_committed = False
        self.logged: dict[str, float] = {}
        self.let_out = False  # an exception left the body: nobody may go on from here
        self.alone_again = False  # only this rank begins it again
        self.entered = False
        self._inside = False
        self._body = body
        self.alone: LoggedValues | None = None  # outside ftrun
        self._modes: tuple[Any, ...] = ()

    @property
    def committed(self) -> bool:
        """Is the update of this step part of the model? Known after the `with`.

        Raises:
            UsageError: If the script asks inside the `with`.
        """
        if self._inside:
            raise UsageError(
                f"step.committed inside the body of step {self.index}: it is known after the `with step:`, test it there",
                explain="F318",
            )
        return self.is_committed

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
        if body.position.where in (Where.BODY, Where.PASSED):
            inside = body.position.index_of(body.position.number)
            raise UsageError(f"`with step` inside the body of step {inside}; bodies do not nest")
        self._modes = thread_modes()
        body.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        body, self._inside = self._body, False
        swallowed = None if error is None else swallowed_in_backward(error)
        if body is None:
            self.is_committed = kind is None
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
        """End the body. True: it was aborted, and the loop does the step again. Raises what the gate or the update raises."""
        try:
            if body.position.where is Where.BODY:  # else the gate has called it already
                body.position.forbid_interrupts()
            if error is None:
                if body.position.where is Where.BODY:
                    body.pass_gate()
                body.complete()
                self.is_committed = True
                if body.logs:
                    self.logged = body.kit.logged.of(body.position.number)
                return False
            if why := body.kit.state.why_not_resized(error):
                raise UsageError(why, explain="F395") from error
        except Interrupt as interrupt:
            error = interrupt
        except Exception as failure:
            body.leave()
            report_exception(body.kit.context, failure, "body")
            raise
        restore_modes(self._modes)
        self.alone_again = isinstance(error, Again)
        if isinstance(error, Interrupt) and body.position.where is Where.PASSED:
            body.kit.context.make_way("its update was half done, which cannot be undone")
        aborted = isinstance(error, Interrupt) or (isinstance(error, Exception) and body.raised(error))
        body.leave()
        return aborted


class Body:
    """Runs what ftrun does between the two ends of `with step`."""

    def __init__(self, kit: Kit, commit: Commit, calls: Calls, survivor: Survivor) -> None:
        self.kit = kit
        self.position = kit.position
        self._commit = commit
        self._calls = calls
        self._survivor = survivor
        self._words = kit.context.cell.words()
        self._observers = kit.observers
        self._forward = False  # a protected model was called in this body
        self._updates = False  # a protected optimizer updates in this body
        self.logs = False  # this step had something to log, and is past its gate
        self._carry = False  # gradients live on over optimizer steps
        self._marks: dict[int, tuple[int, int]] | None = None  # gradients at the start of the body: number -> object, writes
        self._grads: list[torch.Tensor | None] = []

    def begin(self) -> None:
        """Enter the body."""
        kit, context, number = self.kit, self.kit.context, self.position.number
        self.position.where = Where.LOOP
        # after a job.call the others may have to repeat it with this rank, or all go back to an earlier step: then the first
        # collective (or the gate) interrupts the body, and the loop hands the step out again
        while context.stop_pending() and not self._calls.made:
            if self._survivor.rejoin_at(number) is None:
                break
        self._forward = self._updates = False
        if kit.logged.pending:
            kit.logged.forget()
        self.logs = False
        self.position.enter_body()
        context.phase(Phase.FORWARD)
        self._marks = self._marked() if not self._carry and True in kit.ledger.alive else None
        if kit.pending.redo is not None:
            self._survivor.step_begins()
        self._observers.body_started()

    def _marked(self) -> dict[int, tuple[int, int]]:
        """Mark the gradients; in most bodies only a few of each optimizer, since a script zeroes them together."""
        state = self.kit.state
        some = enumerate(state.tensors) if state.looking else state.few
        if not state.is_sharded:
            return {i: (id(grad), write_count(grad)) for i, p in some if (grad := p.grad) is not None}
        return {i: (id(grad), write_count(local_of(grad))) for i, p in some if (grad := p.grad) is not None}

    def model_called(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that the script calls a protected model."""
        self._words[F.PROGRESS] = time.monotonic_ns()
        if self.position.where is Where.BODY:
            self._observers.model_called(args, kwargs)
            if not self._forward:
                self._forward_starts()

    def _forward_starts(self) -> None:
        self._forward = True
        if "forward_started" in self._observers.heard:
            self._observers.forward_started()

    def backward_started(self) -> None:
        """Note that the backward is about to compute the first gradient of a body."""
        if self.position.where is not Where.BODY or self._words[F.PHASE] == Phase.BACKWARD:
            return
        self.kit.context.phase(Phase.BACKWARD)
        if self._marks is not None:
            if self._marks and not self._marks.items().isdisjoint(self._marked().items()):
                self._carry = True  # the script goes on accumulating after an update
                self.kit.ledger.late(self.position.number)
            self._marks = None
        if "backward_started" in self._observers.heard:
            self._observers.backward_started()

    def update_begins(self, optimizer: Any, bare: bool = True) -> None:
        """Begin the update of a protected optimizer; the first one in a body passes the gate.

        Args:
            optimizer: The optimizer, whose `step()` the script called.
            bare: The script called `step()` without arguments.

        Raises:
            UsageError: Outside a body.
        """
        where = self.position.where
        if where is not Where.BODY and where is not Where.PASSED:
            raise UsageError("optimizer.step() of a protected optimizer outside `with step:`")
        if where is Where.BODY:
            self.pass_gate(optimizer)
            self._updates = True
        self.kit.ledger.region.update_begins(optimizer, bare)

    def update_done(self, *_: Any) -> None:
        """Note that a protected optimizer has stepped."""
        if self.kit.ledger.region.plain:
            self.kit.ledger.region.update_done()

    def pass_gate(self, optimizer: Any = None) -> None:
        """Arrive and go on into the update of `optimizer`; without one the body ends here.

        Raises:
            Interrupt: If the launcher stopped the world before the gate opened.
            Exception: Whatever an observer raises.
        """
        kit, context, number = self.kit, self.kit.context, self.position.number
        if not self._forward:
            self._forward_starts()  # the body has called no protected model
        self.position.forbid_interrupts()
        context.phase(Phase.GATE)
        kit.registry.settle()
        # kept until the body ends: the optimizer is about to read them too, and a read makes new objects
        grads = self._grads = kit.state.grads()
        self._observers.gate_ahead(number, optimizer, grads)
        accumulating = optimizer is None or self._carry
        self.logs = bool(kit.logged.pending)
        early = not self.logs and not kit.ledger.reads_device_at_gate(accumulating, optimizer)
        if early:
            self._commit.record(number, accumulating, grads, optimizer)
        kit.state.finish_device(context.stop_pending)
        if context.stop_pending():
            raise Interrupt  # gradients may be garbage: a stop completes collectives
        if kit.registry.broken is not None:
            kit.registry.check()
        self._observers.gate_reached(number, optimizer, grads)
        if not early:
            if self.logs:
                epoch = context.cell[F.EPOCH]
                kit.logged.gather(number, **({"epoch": epoch - 1} if epoch else {}), step=self.position.index_of(number))
            self._commit.record(number, accumulating, grads, optimizer)
        if not self._commit.arrive(number):
            raise Interrupt
        self.position.where = Where.PASSED
        self._observers.gate_passed(number)
        self._commit.open()
        context.phase(Phase.UPDATE)
        if "update_started" in self._observers.heard:
            self._observers.update_started(number)

    def complete(self) -> None:
        """Seal the step, since the script left the body after its gate."""
        kit, context, number = self.kit, self.kit.context, self.position.number
        kit.ledger.updated = self._updates
        self._grads = []
        kit.ledger.region.ended()
        if kit.ledger.region.hidden and context.board[Head.MADE]:
            context.note_inexact(Inexact.UPDATE_DOUBTED)
        kit.state.absorb()
        if kit.reducers.recording and kit.reducers.commit(number):
            kit.state.manifest.facts["reducers"] = kit.reducers.facts()
            kit.state.arena.write_manifest(kit.state.manifest)
        self._commit.seal(number, accumulating=not self._updates or self._carry)
        self._observers.step_done(number)
        context.phase(Phase.DONE)
        if self._words[F.BUSY] & Busy.FIRST:
            context.busy(Busy.FIRST, False)
        self.position.leave_body()
        self._commit.tell(number)
        if self.logs:
            kit.logged.write()
        if kit.snapshots.every:
            kit.snapshots.take_if_due(number + 1)

    def leave(self) -> None:
        """Leave a body that was aborted, or that raised."""
        self._grads = []
        self.position.raised_after_gate = self.position.where is Where.PASSED
        self.position.leave_body()

    def raised(self, error: Exception) -> bool:
        """Report a body's exception, unless a stop caused it. True = the world does the step again; False = let it out."""
        context, passed = self.kit.context, self.position.where is Where.PASSED
        if context.stop_pending() and not passed:
            return True  # a consequence of the stop, which cut the collective off
        self.position.forbid_interrupts()
        report_exception(context, error, "body")
        if passed or final_code(error) or symptoms.of_exception(error).fault is Fault.CUDA:
            return False  # after a CUDA error nothing works in this process: it ends, and is replaced
        context.cell[F.RAISED_NS] = time.monotonic_ns()
        context.cell[F.RAISED] = context.generation
        context.board.launcher_bell.ring()
        try:
            context.wait_until(lambda: bool(context.board[Head.ENDING]), WORLD)
        except Interrupt:
            return True
        return False
