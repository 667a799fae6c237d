"""The order of writes with which a step becomes part of the training, in one place: it is the protocol.

    GATE slot -> arrive -> (gate opens) -> memory OPEN -> update -> END slot -> seal -> bells

A rank that dies before its arrival has not been at the gate, and the step is done again by all. From the arrival on the GATE slot and
the memory as of the start of the step are there for a replacement; from the seal on the END slot and the memory as of its end. In
between the memory is OPEN, and another rank's is taken. Both a body and the end of a loop go through here; the latter updates nothing.

On a GPU what the GATE slot holds is captured while the device still computes the gradients, unless the slot holds gradients itself.
Then the device is waited for. Behind that stand a look at the stop, at the one number that the checks had brought to the host, one copy
into the slot, the arrival and the gate: each microsecond there is idle time of the device, as its next kernel is the update's first. The
slot is not written before the wait: a rank that died in the update before may still need the one that is there, to tell what that update
changed. The END slot is captured when the update is queued, and the device writes its seal itself: nothing there waits for the update.
tests/gpu/test_overlap.py counts what stands where.
"""

from __future__ import annotations

from ftrun.worker.link import crash_points
from ftrun.worker.repair.kit import Kit
from ftrun.worker.repair.survivor import Survivor
from ftrun.worker.step.gate import Gate


class Commit:
    """Of one rank; `number` is a gate number."""

    def __init__(self, kit: Kit, survivor: Survivor) -> None:
        self._kit = kit
        self._survivor = survivor
        self._gate = Gate(kit)
        self.record = kit.ledger.record_gate  # first of all: what a replacement needs from the gate on is taken

    def arrive(self, number: int) -> bool:
        """Seal what was recorded, arrive, and wait. True = every rank has arrived, False = the world was stopped first.

        Raises:
            WorkerError
        """
        self._kit.ledger.seal_gate()
        if crash_points.armed:
            crash_points.point("slot-gate", number, self._kit.context.rank)
        return self._gate.arrive(number)

    def open(self, number: int) -> None:
        """The update begins: from here on the memory of this rank is no step's."""
        self._kit.state.arena.open()
        if crash_points.armed:
            crash_points.point("open", number, self._kit.context.rank)

    def seal(self, number: int, accumulating: bool) -> None:
        """What comes after gate `number` is done: a replacement begins behind it from here on."""
        kit, tag = self._kit, number + 1
        kit.ledger.end(tag, accumulating)
        if crash_points.armed:
            crash_points.point("slot-end", number, kit.context.rank)
        kit.state.arena.sealed(tag)
        if crash_points.armed:
            crash_points.point("sealed", number, kit.context.rank)

    def tell(self, number: int) -> None:
        """It is sealed: a replacement may wait for that, and after a repair the launcher does."""
        if self._kit.context.stop_pending():
            self._kit.context.board.ring_workers()
        if self._kit.pending.redo is not None:
            self._survivor.step_done(number)
