"""job.call: functions that communicate, between the hand-out of a step and its body. After a stop everyone repeats them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, TypeVar

from ftrun.core.errors import UsageError
from ftrun.core.shared.board import Busy
from ftrun.worker.recovery.kit import Kit
from ftrun.worker.recovery.survivor import Survivor
from ftrun.worker.runtime.position import Interrupt, Where
from ftrun.worker.state import rng

T = TypeVar("T")


class Calls:
    """The calls of one iteration, in order; `made` holds them until the next step is handed out."""

    def __init__(self, kit: Kit, survivor: Survivor) -> None:
        self._kit = kit
        self._survivor = survivor
        self.made: list[Callable[[], Any]] = []
        self._before: dict[str, Any] = {}

    def forget(self) -> None:
        """A step is handed out: its iteration has made no call yet."""
        self.made = []

    def run(self, fn: Callable[[], T]) -> T:
        """The result of `fn`, called until it completes in a world that nobody stops. Errors: UsageError."""
        context, position = self._kit.context, self._kit.position
        if position.where in (Where.BEFORE, Where.BETWEEN):
            return fn()
        if position.in_body:
            raise UsageError("job.call inside `with step`: call the function directly there")
        if position.where is not Where.HANDED_OUT:
            raise UsageError("job.call outside an iteration's start: call it between the loop's `for` and `with step:`")
        if not self.made:
            self._before = rng.capture()
        self.made.append(fn)
        again = False
        while True:
            try:
                while context.stop_pending():
                    again = True
                    if self._survivor.rejoin_at(position.number) is None:
                        # everyone goes back to an earlier step, and this function cannot be left: a replacement goes back
                        os.kill(os.getpid(), signal.SIGKILL)
                return self._once(fn, again)
            except Interrupt:
                again = True

    def _once(self, fn: Callable[[], T], again: bool) -> T:
        registry, context = self._kit.registry, self._kit.context
        registry.calling += 1
        context.busy(Busy.CALL, True)
        try:
            if again:  # the replacement makes them all: so does everyone
                rng.apply(self._before)
                for earlier in self.made[:-1]:
                    earlier()
            return fn()
        finally:
            registry.calling -= 1
            context.busy(Busy.CALL, False)
