"""The gate of a step, as one rank passes it: no rank begins an update before every rank has all it needs to finish it."""

from __future__ import annotations

import time
from typing import Any

from ftrun import native
from ftrun.core.errors import WorkerError
from ftrun.core.shared import gate
from ftrun.core.shared.board import F
from ftrun.worker.recovery.kit import Kit
from ftrun.worker.runtime import crash_points

_LOOK = 0.1  # seconds between two looks at the gate when no bell rings


class Gate:
    """Arrivals of all ranks prove that it may open; any of them opens it."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._arrival = kit.context.cell.field_address(F.ARRIVAL)
        self._arrivals: Any = None  # that of every rank
        self._generation = 0  # the world that those are of

    def arrive(self, number: int) -> bool:
        """Arrive at the gate of step `number`. True = passed, False = the world was stopped first.

        Errors: WorkerError when the run ends and it cannot open any more.
        """
        context, board, observers = self._kit.context, self._kit.context.board, self._kit.observers
        generation = context.generation
        if self._generation != generation:
            self._arrivals = native.AddressList([cell.field_address(F.ARRIVAL) for cell in context.cells()])
            self._generation = generation
        wanted = gate.arrival(generation, number)
        complete = native.arrive(self._arrival, wanted, self._arrivals)
        if crash_points.armed:
            crash_points.point("arrive", number, context.rank)
        if complete:
            board.ring_gate()  # the last one sees all others: they wake up while it opens the gate
        observers.arrived(number)
        while True:
            seen = board.gate_bell()
            raw = board.gate()
            verdict = gate.verdict(raw, generation, number)
            if verdict == gate.PASS:
                if crash_points.armed:
                    crash_points.point("pass", number, context.rank)
                return True
            if verdict == gate.STOPPED:
                return False
            left_to_another = crash_points.armed and crash_points.leaves_gate(number, context.rank)
            if complete and not left_to_another and observers.may_open(number):
                new = gate.opened(raw, generation, number, (wanted,))
                if new is not None:
                    if board.swap_gate(raw, new):
                        if crash_points.armed:
                            crash_points.point("swap", number, context.rank)
                        board.show_opening(number, time.monotonic_ns())
                        board.ring_gate()
                    continue
            board.wait_gate(seen, _LOOK)
            complete = native.all_equal64(self._arrivals, wanted)
            if not complete:
                observers.waiting(number)
            if why := context.cut_short():
                raise WorkerError(why)
