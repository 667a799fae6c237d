"""The gate of a step, as one rank passes it: no rank begins an update before every rank has all it needs to finish it.

What a gate costs, and why. Its nature: every rank waits for the slowest, once more in a step than the gradients' exchange makes it
wait. Where each rank has a core of its own that is the difference between the ranks' ways from the last gradient to the gate. Where
ranks share cores (four on two), those that arrived first sleep, and once fewer ranks are still on their way than there are cores, a
core idles until the last one is there; without a gate it would begin an update meanwhile. So the wall time of a step grows by more
than the processor time that is spent before the gate, and only less work there makes it smaller.

What is ours to keep small: an arrival wakes nobody; the last one to arrive opens the gate first and rings then, once, so that whoever
wakes can pass. Ringing before the opening would hide the time that a sleeper takes to wake, on cores that idle; on shared cores the
woken take the core from the rank that is about to open, find the gate shut, and look at everything a second time. A sleeper
looks by itself once in _LOOK: what can change at the gate rings, also on behalf of the dead (the launcher closes the gate then).
"""

from __future__ import annotations

import time
from typing import Any

from ftrun import native
from ftrun.core.errors import WorkerError
from ftrun.core.shared import gate
from ftrun.core.shared.board import Busy, F
from ftrun.worker.link import crash_points
from ftrun.worker.repair.kit import Kit

_LOOK = 1.0  # seconds between two looks at the gate when no bell rings
_LOOK_BETWEEN = 0.1  # the same at the end of a loop or a call, where other ranks may be in a step: no bell tells that
_LOOK_AGAIN = "look again"  # at the gate's word, which has changed
_BETWEEN = Busy.AT_LOOP_END | Busy.AT_CALL_END


class Gate:
    """Arrivals of all ranks prove that it may open; any of them opens it."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._observers = kit.observers
        self._arrival = kit.context.cell.field_address(F.ARRIVAL)
        self._arrivals: Any = None  # that of every rank
        self._generation = 0  # the world that those are of

    def arrive(self, number: int) -> bool:
        """Arrive at the gate of step `number`. True = passed, False = the world was stopped first.

        Raises:
            WorkerError: When the run ends and it cannot open any more.
        """
        context, board, observers = self._kit.context, self._kit.context.board, self._observers
        generation = context.generation
        if self._generation != generation:
            self._arrivals = native.AddressList([cell.field_address(F.ARRIVAL) for cell in context.cells()])
            self._generation = generation
        wanted = gate.arrival(generation, number)
        complete = native.arrive(self._arrival, wanted, self._arrivals)
        if crash_points.armed:
            crash_points.point("arrive", number, context.rank)
        if "arrived" in observers.heard:
            observers.arrived(number)
        ring = complete  # the last one sees all others: it opens the gate, or has them look why it does not
        while True:
            seen = board.gate_bell()
            raw = board.gate()
            verdict = gate.verdict(raw, generation, number)
            if verdict == gate.WAIT and complete:
                verdict = self._opens(raw, number, wanted)
            if verdict == gate.PASS:
                if crash_points.armed:
                    crash_points.point("pass", number, context.rank)
                return True
            if verdict == gate.STOPPED:
                return False
            if verdict == _LOOK_AGAIN:
                continue
            if ring:
                ring = False
                board.ring_gate()
                board.ring_launcher()  # it may have to name a rank whose weights are corrupt
            board.wait_gate(seen, _LOOK_BETWEEN if context.cell[F.BUSY] & _BETWEEN else _LOOK)
            complete = native.all_equal64(self._arrivals, wanted)
            if not complete:
                observers.waiting(number)
            if why := context.cut_short():
                raise WorkerError(why)

    def _opens(self, raw: int, number: int, wanted: int) -> str:
        """Every rank has arrived: open the gate, whose word was `raw`, and pass it.

        Raises:
            What an observer raises.
        """
        context, board = self._kit.context, self._kit.context.board
        if crash_points.armed and crash_points.leaves_gate(number, context.rank):
            return gate.WAIT
        try:
            if not self._observers.may_open(number):
                return gate.WAIT
        except BaseException:
            board.ring_gate()  # the others are to find the same
            raise
        new = gate.opened(raw, context.generation, number, (wanted,))
        if new is None:
            return gate.WAIT
        if not board.swap_gate(raw, new):
            return _LOOK_AGAIN  # another rank was quicker, or the world is stopped
        if crash_points.armed:
            crash_points.point("swap", number, context.rank)
        board.show_opening(number, time.monotonic_ns())
        board.ring_gate()
        return gate.PASS
