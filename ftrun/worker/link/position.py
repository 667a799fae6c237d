"""Where this rank is in its run. The step loop writes it, and a rank's way back to the host snapshot; all others only read it."""

from __future__ import annotations

import threading
from enum import IntEnum


class Interrupt(BaseException):
    """The world stops: leave the step body. A BaseException, so that `except Exception` does not swallow it."""


class Again(Interrupt):
    """Leave the step body, and begin it again: this rank alone, which no other one waits for in it yet."""


class Where(IntEnum):
    """Which part of the run the script's training thread is in."""

    BEFORE = 0  # no step was handed out yet
    LOOP = 1  # in our loop, and no step is handed out
    HANDED_OUT = 2  # the loop gave a step to the script, which did not enter its body yet
    BODY = 3  # in a body, before its gate
    PASSED = 4  # in a body, after its gate
    LEFT = 5  # the script has left a body and did not ask for the next step yet
    BETWEEN = 6  # a loop has ended and no other began
    CALL = 7  # in a function of job.call, between two loops


class Position:
    """Steps are counted by gate numbers, which grow over all loops of a run; a step index is what the script counts."""

    def __init__(self) -> None:
        self.thread = threading.main_thread()  # the script's thread that makes groups and runs bodies
        self.lock = threading.Lock()  # held to leave a body, and to answer or interrupt for a thread in one
        self.where = Where.BEFORE
        self.base = 0  # gate number of the current loop's first step
        self.first = 0  # its step index; between two loops, that after the last one
        self.number = -1  # gate number that was handed out last
        self.attempt = 0  # how often it was done again
        self.called = False  # job.call was, since then
        self.interruptible = False  # before its gate, an Interrupt may be raised in its thread anywhere
        self.interrupt_sent = False  # and may not have arrived yet
        self.raised_after_gate = False  # an exception left a body whose update had begun

    @property
    def in_body(self) -> bool:
        return self.where is Where.BODY or self.where is Where.PASSED

    @property
    def outside(self) -> str:
        """What lies behind the script's code that runs now, if a replacement would never run that code; else ""."""
        if self.raised_after_gate or self.where is Where.PASSED:
            return "after the update"
        after = {Where.LEFT: "after the body", Where.BETWEEN: "after the loop", Where.CALL: "after the loop"}
        return after.get(self.where, "")

    def index_of(self, number: int) -> int:
        """Step index of a gate number of the current loop."""
        return self.first + number - self.base

    def trains_here(self) -> None:
        """The calling thread is the one that trains; it need not be the main thread."""
        self.thread = threading.current_thread()

    def enter_body(self) -> None:
        with self.lock:
            self.thread = threading.current_thread()  # as `trains_here`
            self.where = Where.BODY
            self.interruptible = True

    def allow_interrupts(self) -> None:
        """In a function of job.call, which is done again whatever it was interrupted in."""
        with self.lock:
            self.trains_here()
            self.interruptible = True

    def leave_body(self) -> None:
        with self.lock:
            self.where = Where.LOOP

    def forbid_interrupts(self) -> None:
        """From here on no asynchronous Interrupt arrives; one already on its way is swallowed here."""
        with self.lock:
            self.interruptible = False
            sent, self.interrupt_sent = self.interrupt_sent, False
        if sent:
            # it is delivered within a few bytecodes; taking it back instead would leave the interpreter's
            # "look for asynchronous exceptions" flag set for good, which slows every later bytecode
            try:
                for _ in range(1000):
                    pass
            except Interrupt:
                pass
