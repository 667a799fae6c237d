"""The loop of one rank: it hands out each step until that is committed, leaves a stopped world and joins the next."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ftrun.core.errors import UsageError, WorkerError
from ftrun.core.shared.board import Busy, F, Flag, Phase
from ftrun.worker.link.callers import caller
from ftrun.worker.link.exception_report import give_up
from ftrun.worker.link.position import Interrupt, Where
from ftrun.worker.memory import serialization
from ftrun.worker.repair import pipelines
from ftrun.worker.repair.kit import Kit
from ftrun.worker.repair.recovery_points import END, START
from ftrun.worker.repair.survivor import Survivor
from ftrun.worker.step.body import Body, Step
from ftrun.worker.step.calls import Calls
from ftrun.worker.step.commit import Commit

T = TypeVar("T")


class Loop:
    """All loops of one rank; protect() makes this object, which lives as long as the process."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self._observers, self._position = kit.observers, kit.position
        self._survivor = Survivor(kit)
        self._commit = Commit(kit, self._survivor)
        self.calls = Calls(kit, self._survivor)
        kit.registry.keep_results = lambda: kit.ledger.log(kit.registry.recorder.unsaved())
        self.body = Body(kit, self._commit, self.calls, self._survivor)
        self._calls_of_epochs = 0
        self._in_epochs = False
        self._warned = False  # of a second loop outside job.epochs

    def steps(self, first: int, length: int) -> Iterator[Step]:
        """Hand out `length` steps from step index `first` on."""
        position = self.kit.position
        self._outside_body("job.steps")
        first, length = self._as_begun(first, length)
        if self._is_over(first, length):
            self._continue_here()
            return
        self._warn_of_second_loop()
        number = self._enter()
        end = position.base + length
        marks = self.kit.registry.recorder.marks
        before = sum(mark["length"] for mark in marks if "length" in mark and mark["base"] < position.base)
        variables, mark = self.kit.ledger.variables, object()
        variables.loop = mark
        try:
            yield from self._each(number, end, before)
        finally:
            if variables.loop is mark:  # the script may have left the loop, and begun another one meanwhile
                variables.leave()  # drops the loop's frames

    def _each(self, number: int, end: int, before: int) -> Iterator[Step]:
        """Hand out steps from gate number `number` up to the loop's `end`; `before`: how many steps of this run precede the loop."""
        context, position = self.kit.context, self.kit.position
        while True:
            if context.stop_pending():
                number = self._survivor.rejoin(rewind=False)
            if number >= end:
                self.kit.ledger.loop_ends(end)
                self._survivor.tell_missed(end)
                if self.kit.ledger.loader is not None:
                    self.kit.ledger.loader.finish()
                if self._end(end):
                    return
                number = self._survivor.rejoin(rewind=False)
                continue
            self._hand_out(number)
            step = Step(position.index_of(number), before + number - position.base, self.body)
            yield step
            if position.where in (Where.BODY, Where.PASSED):
                self._outside_body("the next step")
            position.where = Where.LOOP
            if not step.entered:
                raise UsageError(f"step {step.index} was taken from the loop, but its `with step:` was skipped", explain="F317")
            if step.let_out:
                give_up(context, step.index)
            if step.is_committed:
                number += 1
            elif not (step.alone_again and self._survivor.begins_again()):
                number = self._survivor.rejoin(rewind=True)

    def keep(self, name: str, thing: Any) -> None:
        """Keep `thing` with the steps from now on, like an argument of `protect`.

        Raises:
            UsageError: After the first step.
        """
        position = self.kit.position
        if position.where is not Where.BEFORE or position.base > 0:
            raise UsageError("job.state after the first step; call it before the first loop")
        self._take_in(name, thing)

    def _take_in(self, name: str, thing: Any) -> None:
        kit = self.kit
        kit.state.python.keep(name, thing)
        saved = kit.pending.restart
        if saved is not None and name in saved.python:  # a replacement's script may look at it before its loop
            thing.load_state_dict(serialization.decode(saved.python[name]))

    def call(self, fn: Callable[[], T]) -> T:
        """Call `fn` until it completes in a world that nobody stops, and return its result.

        Raises:
            UsageError: Inside a body, or where the loop has handed out no step.
        """
        position = self.kit.position
        if position.where is Where.BETWEEN or (position.where is Where.BEFORE and position.base > 0):
            return self._call_between(fn)
        return self.calls.run(fn)

    def _call_between(self, fn: Callable[[], T]) -> T:
        """Call `fn` as a loop without steps: each try begins with the state at its start, and a gate ends it for all ranks."""
        kit, context, position = self.kit, self.kit.context, self.kit.position
        recorder = kit.registry.recorder
        first, _ = self._as_begun(position.first, 0)
        if self._is_over(first, 0):
            result = fn()  # the others are past it: the record replays the results of its collectives
            self._continue_here()
            return result
        end = self._enter()
        begun = recorder.begun
        while True:
            if not context.stop_pending():
                kit.ledger.log(recorder.undo(begun))
                self._hand_out(end, Where.LOOP)
                self._survivor.step_begins()
                position.where = Where.CALL
                try:
                    result = self.calls.interruptible(fn)
                except Interrupt:
                    pass
                except Exception:
                    position.where = Where.BETWEEN
                    raise
                else:
                    kit.ledger.log(recorder.settled())
                    if self._end(end, Busy.AT_CALL_END):
                        return result
            position.where = Where.LOOP
            if self._survivor.rejoin_at(end, rewind=True) is None:
                kit.context.make_way("everyone goes back to an earlier step, and it was in a job.call behind that")

    def epochs(self, start: int, total: int) -> Iterator[int]:
        """Hand out epochs `start` up to `total`; a replacement begins in the epoch that runs, not in a past one."""
        self._outside_body("job.epochs")
        kit, position, recorder = self.kit, self.kit.position, self.kit.registry.recorder
        call, self._calls_of_epochs = self._calls_of_epochs, self._calls_of_epochs + 1
        known = [mark for mark in recorder.marks if mark.get("call") == call] if kit.pending.resume >= 0 else []
        if known:
            # no slot holds the script's work between two loops: a replacement of a rank that died there repeats it
            begun = [
                mark for mark in known if mark["base"] < kit.pending.resume or self._handed_out_before(mark["base"])
            ]
            here = (begun or known)[-1 if begun else 0]
            for mark in recorder.marks:
                if "length" in mark and position.base <= mark["base"] < here["base"]:
                    kit.observers.loop_started(mark["first"], mark["length"])  # which is over, too
                    self._passed_end()
            start, position.base = here["epoch"], here["base"]
            recorder.skip_to(here["collectives"])
        for epoch in range(start, total):
            self._mark(call=call, epoch=epoch, base=position.base, collectives=recorder.begun)
            kit.context.cell[F.EPOCH] = epoch + 1
            self._in_epochs = True
            try:
                yield epoch
            finally:
                self._in_epochs = False
            self._outside_body("the next epoch")
        self._mark(call=call, epoch=max(start, total), base=position.base, collectives=recorder.begun)

    def _warn_of_second_loop(self) -> None:
        """Warn that a replacement repeats the script's work between loops, unless job.epochs tells it where to begin."""
        context, again = self.kit.context, self.kit.position.where is Where.BETWEEN
        if again and not self._in_epochs and not self._warned and context.rank == 0:
            self._warned = True
            print(
                f"ftrun: a second loop outside job.epochs, at {caller()}: a replaced rank would run what the script does between the "
                "loops again, alone, such as writing a checkpoint; put the loops into `for epoch in job.epochs(n):`",
                file=sys.stderr,
                flush=True,
            )

    def _handed_out_before(self, number: int) -> bool:
        """Did the replaced rank die in the step that this replacement goes on with, and is that `number`?"""
        return self.kit.pending.resume == number == self.kit.ledger.slots.tag(START)

    def _mark(self, **mark: int) -> None:
        """Note for a replacement where a loop or an epoch begins: its own script may have newer numbers, from a file."""
        recorder, ledger = self.kit.registry.recorder, self.kit.ledger
        if mark not in recorder.marks:
            recorder.marks.append(mark)
            if ledger.slots.log.used:
                ledger.log([mark])

    def _outside_body(self, what: str) -> None:
        position = self.kit.position
        if position.in_body:
            inside = position.index_of(position.number)
            raise UsageError(f"{what} was asked for inside the body of step {inside}; leave it first")

    # -- the ends of a loop ------------------------------------------------------------------------------------------

    def _as_begun(self, first: int, length: int) -> tuple[int, int]:
        """Return the next loop's first step index and length, as this rank's first incarnation noted them."""
        base, marks = self.kit.position.base, self.kit.registry.recorder.marks
        if self.kit.pending.resume >= 0:
            first, length = next(
                # the last one: after a job.call that raised, a loop began where the call would have ended
                (
                    (mark["first"], mark["length"])
                    for mark in reversed(marks)
                    if mark["base"] == base and "length" in mark
                ),
                (first, length),
            )
        self._mark(base=base, first=first, length=length)
        return first, length

    def _is_over(self, first: int, length: int) -> bool:
        """Begin a loop of `length` steps. True: a replacement skips it, since its predecessor had left it."""
        kit, position = self.kit, self.kit.position
        kit.observers.loop_started(first, length)
        if kit.pending.resume > position.base + length:
            position.base += length + 1
            position.first = first + length
            self._passed_end()
            return True
        position.first = first
        kit.context.cell.set_shift(first - position.base)
        if length:  # a job.call is none
            kit.context.cell[F.LOOP_END] = first + length
        return False

    def _continue_here(self) -> None:
        """Restore the replaced rank's state behind a loop or a call that is over, as far as a slot holds it.

        A replacement's script may do its work from here again.
        """
        kit, base = self.kit, self.kit.position.base
        slots, ledger = kit.ledger.slots, kit.ledger
        ledger.variables.here()
        if kit.pending.resume == base and slots.tag(START) != base:
            self._put_back(base, in_call=True)  # and the script goes on from here
        elif slots.tag(END) == base:
            ledger.put_back(ledger.read(END), 0, in_call=True)
        elif slots.tag(START) == base:  # as of the beginning of a call that is over
            ledger.put_back(ledger.read(START), 0, in_call=True)
        ledger.variables.leave()

    def _finish_recording(self) -> None:
        """Keep the results of the collectives before the first step, just before its hand-out."""
        kit, recorder = self.kit, self.kit.registry.recorder
        for number, pipeline in enumerate(pipelines.found(kit.state.python.objects)):
            self._take_in(f"pipeline {number}", pipeline)
        if not kit.ledger.slots.log.used:  # a first incarnation, or the predecessor's slots are lost
            kit.ledger.log(recorder.opening([group.key for group in kit.registry.groups]))
        if not recorder.replaying:
            kit.ledger.end(0, accumulating=False)  # the script's changes since protect() count
            kit.snapshots.take_if_due(0)
        kit.ledger.log(recorder.end_replay())
        # from here on this rank can be replaced: before, its record of collectives was not complete
        kit.context.milestone(Flag.PROTECTED | Flag.LOOPING)

    def _enter(self) -> int:
        """Enter the loop, and return the gate number at which this rank starts."""
        kit, context = self.kit, self.kit.context
        # groups made since protect(); one made in the first loop does not end a run that has trained
        kit.registry.refuse_others(go_on=kit.position.where is not Where.BEFORE)
        context.cell.drop_flag(Flag.LOOP_DONE)
        if kit.position.where is Where.BEFORE:
            kit.registry.speak()
            self._finish_recording()
        elif kit.position.where is Where.BETWEEN:
            kit.ledger.log(kit.registry.recorder.settled())
        kit.position.where = Where.LOOP
        kit.ledger.new_loop()
        world = context.world
        if world is None:
            raise WorkerError("no world")
        if kit.pending.resume < 0:
            self._await_protected()
            return kit.position.base
        if world.tail:
            context.make_way("it was to run the end of the script alone, and the others are in another loop")
        number = self._survivor.rejoin(rewind=False)
        kit.pending.resume = -1
        return number

    def _await_protected(self) -> None:
        """Wait before the first step until every rank can be recovered, or until the launcher stops the world."""
        context = self.kit.context
        context.board.ring_workers()
        cells = context.cells()
        try:
            while not context.wait_until(lambda: all(c.has(Flag.PROTECTED) for c in cells), 60.0):
                pass  # the launcher's start deadline ends a world that never gets there
        except Interrupt:
            pass

    def _end(self, end: int, kind: Busy = Busy.AT_LOOP_END) -> bool:
        """Pass the virtual gate after a loop or a call: replicas stay until every rank is here. False = the world was stopped first."""
        kit, context, position = self.kit, self.kit.context, self.kit.position
        position.where = Where.LOOP
        if kit.pending.restart is not None:
            kit.ledger.variables.here()  # a replacement may begin here
        self._put_back(end)
        kit.logged.write()
        context.phase(Phase.GATE)
        position.number = end
        context.cell[F.STEP] = position.index_of(end) + 1
        if kind is Busy.AT_LOOP_END:
            kit.observers.handed_out(end)
        self._survivor.step_begins()
        # a step that updates nothing: the state after it is the state before, and a replacement finds it sealed
        if not kit.state.finish_device(context.stop_pending):
            return False
        if kind is Busy.AT_LOOP_END:
            kit.observers.loop_ending(end)
        self._commit.record(end, True, kit.state.grads())
        context.busy(kind, True)
        opened = self._commit.arrive(end)
        context.busy(kind, False)
        if not opened:
            return False
        kit.ledger.region.ended()
        self._commit.seal(end, accumulating=True)
        context.board.ring_workers()  # a replacement may wait for this seal
        self._commit.tell(end)
        position.first, position.base = position.index_of(end), end + 1
        position.where = Where.BETWEEN
        kit.ledger.variables.leave()
        self._passed_end()
        context.phase(Phase.DONE)
        context.milestone(Flag.LOOP_DONE)
        return True

    def _passed_end(self) -> None:
        cell = self.kit.context.cell
        cell[F.ENDS] = cell[F.ENDS] + 1

    # -- a step ------------------------------------------------------------------------------------------------------

    def _hand_out(self, number: int, where: Where = Where.HANDED_OUT) -> None:
        """Prepare a step for its hand-out, or a call: seal its START slot, or restore the content of that slot."""
        kit, context, position = self.kit, self.kit.context, self._position
        kit.ledger.variables.here()
        if number == position.number and kit.pending.restart is None:
            position.attempt += 1
            kit.pending.restart = kit.ledger.start_state(number)
        else:
            position.attempt = int(kit.pending.again)
        position.number = number
        position.where = where
        kit.looks.begins(number)
        if self.calls.made:
            self.calls.forget()
        kit.registry.shown.handed_out()
        context.takes_part()
        context.cell[F.ATTEMPT] = position.attempt
        context.cell[F.STEP] = position.index_of(number) + 1
        if self._survivor.tidy:
            self._survivor.tidy_up()
        if kit.state.looking:
            kit.reducers.refuse_hooks()
        puts_back = kit.pending.restart is not None
        if puts_back:
            self._put_back(number, in_call=where is not Where.HANDED_OUT)
        if kit.ledger.loader is not None and not kit.ledger.loader.late:
            kit.ledger.loader.ensure(position.index_of(number))
        if kit.ledger.slots.tag(START) != number:
            kit.ledger.start(number)
        kit.ledger.variables.begins(puts_back)
        if kit.ledger.drew_before == number or kit.pending.redo is not None:
            self._survivor.tell_missed(number)
        context.phase(Phase.IDLE)
        if puts_back:
            kit.logged.write()  # in a replacement, the values that its predecessor did not write
        if where is Where.HANDED_OUT:
            self._observers.handed_out(number)

    def _put_back(self, number: int, in_call: bool = False) -> None:
        """Restore, once, the slot's content that waits for it, if any."""
        pending = self.kit.pending
        saved, pending.restart, pending.again = pending.restart, None, False
        if saved is not None:
            self.kit.ledger.put_back(saved, self.kit.position.index_of(number), in_call)
