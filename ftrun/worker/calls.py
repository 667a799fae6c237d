"""job.call: functions that communicate, between the hand-out of a step and its body. After a stop everyone repeats them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ftrun.core.board import Busy
from ftrun.core.errors import UsageError
from ftrun.worker.runtime.run_link import Interrupt
from ftrun.worker.state import rng

if TYPE_CHECKING:
    from ftrun.worker.engine import Engine

T = TypeVar("T")


class Calls:
    """The calls of one iteration, in order; `made` holds them until the next step is handed out."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.made: list[Callable[[], Any]] = []
        self._before: dict[str, Any] = {}

    def forget(self) -> None:
        """A step is handed out: its iteration has made no call yet."""
        self.made = []

    def run(self, fn: Callable[[], T]) -> T:
        """The result of `fn`, called until it completes in a world that nobody stops. Errors: UsageError."""
        engine = self._engine
        if engine.context.in_body:
            raise UsageError("job.call inside `with step`: call the function directly there")
        if engine.entered or engine.step < 0:
            raise UsageError("job.call outside an iteration's start: call it between the loop's `for` and `with step:`")
        if not self.made:
            self._before = rng.capture()
        self.made.append(fn)
        again = False
        while True:
            try:
                while engine.context.stop_pending():
                    again = True
                    if engine.rejoin_at(engine.step) is None:
                        # everyone goes back to an earlier step, and this function cannot be left: a replacement goes back
                        os.kill(os.getpid(), signal.SIGKILL)
                return self._once(fn, again)
            except Interrupt:
                again = True

    def _once(self, fn: Callable[[], T], again: bool) -> T:
        self._engine.registry.calling += 1
        self._engine.context.busy(Busy.CALL, True)
        try:
            if again:  # the replacement makes them all: so does everyone
                rng.apply(self._before)
                for earlier in self.made[:-1]:
                    earlier()
            return fn()
        finally:
            self._engine.registry.calling -= 1
            self._engine.context.busy(Busy.CALL, False)
