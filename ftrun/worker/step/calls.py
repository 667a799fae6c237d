"""`job.call` between the hand-out of a step and its body runs functions that communicate. After a stop every rank repeats them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ftrun.core.errors import UsageError
from ftrun.core.shared.board import Busy
from ftrun.worker.link.position import Interrupt, Where
from ftrun.worker.repair.kit import Kit
from ftrun.worker.repair.survivor import Survivor
from ftrun.worker.state import rng

T = TypeVar("T")


class Calls:
    """The calls of one iteration, in order; `made` holds them until the next step is handed out."""

    def __init__(self, kit: Kit, survivor: Survivor) -> None:
        self._kit = kit
        self._survivor = survivor
        self.made: list[Callable[[], Any]] = []
        self._before: tuple[Any, dict[str, bytes]] = ({}, {})  # random streams and Python state before the first call

    def forget(self) -> None:
        """Forget the calls of the last iteration, since the loop hands out the next step."""
        self.made = []
        self._kit.position.called = False

    def run(self, fn: Callable[[], T]) -> T:
        """Call `fn` until it completes in a world that nobody stops, and return its result.

        Raises:
            UsageError: Inside a body, or where the loop has handed out no step.
        """
        context, position = self._kit.context, self._kit.position
        if position.where is Where.BEFORE:
            return fn()
        if position.in_body:
            raise UsageError("job.call inside `with step`: call the function directly there", explain="F319")
        if position.where is not Where.HANDED_OUT:
            raise UsageError(
                "job.call outside an iteration's start: call it between the loop's `for` and `with step:`, or after the loop",
                explain="F319",
            )
        if not self.made:
            self._before = self._kit.ledger.captured()
        self.made.append(fn)
        position.called = True
        again = False
        while True:
            try:
                while context.stop_pending():
                    again = True
                    if self._survivor.rejoin_at(position.number) is None:
                        context.make_way("everyone goes back to an earlier step, and it was in a job.call, which cannot be left")
                return self._once(fn, again)
            except Interrupt:
                again = True

    def _once(self, fn: Callable[[], T], again: bool) -> T:
        def every() -> T:
            if again:  # the replacement makes all calls of the iteration, so every rank does
                self._kit.state.python.apply(self._before[1], in_call=True)
                self._kit.ledger.variables.put_back(self._before[1])
                rng.apply(self._before[0])
                for earlier in self.made[:-1]:
                    earlier()
            return fn()

        self._kit.registry.calling += 1
        try:
            return self.interruptible(every)
        finally:
            self._kit.registry.calling -= 1

    def interruptible(self, fn: Callable[[], T]) -> T:
        """Call `fn` and return its result. Raises Interrupt if a stop cut `fn` off, whatever exception `fn` raised."""
        context, position = self._kit.context, self._kit.position
        context.busy(Busy.CALL, True)
        modes, weights = thread_modes(), self._kit.state.weights_aside()
        try:
            position.allow_interrupts()
            result = fn()
            position.forbid_interrupts()
            return result
        except BaseException as error:
            position.forbid_interrupts()
            cut_off = isinstance(error, Interrupt) or (isinstance(error, Exception) and context.stop_pending())
            if not cut_off:
                context.leaves()
                raise
            restore_modes(modes)
            weights.put_back()  # before another rank learns that this one has stopped, and copies them
            raise Interrupt from error
        finally:
            context.busy(Busy.CALL, False)


def thread_modes() -> tuple[Any, ...]:
    """Return torch's settings of this thread that an interrupted `with` of the script may leave behind."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
    )


def restore_modes(modes: tuple[Any, ...]) -> None:
    grad, cpu, cpu_type, cuda, cuda_type = modes
    torch.set_grad_enabled(grad)
    torch.set_autocast_enabled("cpu", cpu)
    torch.set_autocast_dtype("cpu", cpu_type)
    torch.set_autocast_enabled("cuda", cuda)
    torch.set_autocast_dtype("cuda", cuda_type)
    torch.clear_autocast_cache()
