"""The place of this rank in its run. The step loop and the return to a host snapshot write it; all others only read it."""

from __future__ import annotations

import threading
from enum import IntEnum


class Interrupt(BaseException):
    """The world stops: leave the step body. A BaseException, so that `except Exception` does not swallow it."""


class Again(Interrupt):
    """Leave the step body and begin it again, in this rank only, since no other rank waits for it yet."""


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
        self.first = 0  # step index of that step; between two loops, the index after the last step
        self.number = -1  # gate number that was handed out last
        self.attempt = 0  # how often that step was done again
        self.called = False  # the script has called job.call since that hand-out
        self.interruptible = False  # before the gate: an Interrupt may be raised anywhere in the thread
        self.interrupt_sent = False  # an Interrupt was sent, and may not have arrived yet
        self.raised_after_gate = False  # an exception left a body whose update had begun

    @property
    def in_body(self) -> bool:
        return self.where is Where.BODY or self.where is Where.PASSED

    @property
    def outside(self) -> str:
        """Name the part of the script that runs now ("after the update", say) if a replacement would never run it; else ""."""
        if self.raised_after_gate or self.where is Where.PASSED:
            return "after the update"
        after = {Where.LEFT: "after the body", Where.BETWEEN: "after the loop", Where.CALL: "after the loop"}
        return after.get(self.where, "")

    def index_of(self, number: int) -> int:
        """Return the step index of a gate number of the current loop."""
        return self.first + number - self.base

    def trains_here(self) -> None:
        """Take the calling thread for the one that trains; it need not be the main thread."""
        self.thread = threading.current_thread()

    def enter_body(self) -> None:
        with self.lock:
            self.thread = threading.current_thread()  # as `trains_here`
            self.where = Where.BODY
            self.interruptible = True

    def allow_interrupts(self) -> None:
        """Allow interrupts in a function of job.call, which is done again wherever it was interrupted."""
        with self.lock:
            self.trains_here()
            self.interruptible = True

    def leave_body(self) -> None:
        with self.lock:
            self.where = Where.LOOP

    def forbid_interrupts(self) -> None:
        """Let no asynchronous Interrupt arrive from here on; swallow one that is on its way."""
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
