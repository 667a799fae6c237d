"""The order of writes with which a step becomes part of the training, in one place: it is the protocol.

    GATE slot -> arrive -> (gate opens) -> memory OPEN -> update -> END slot -> commit mark -> bells

Theory of operation. A replacement of this rank sees three things that outlive it: the slots, the commit mark of the arena, the gate
word. The order above makes each place of a death readable from them:

    it died                      the others                  its replacement finds and takes
    before its arrival           do step i again             mark i: its own memory; START slot i (END slot i before the hand-out)
    arrived, gate still shut     do step i again             the same: the launcher closes the gate, the arrival is void
    gate open, mark still i      finish the update of i      mark i is too old: a replica's memory, and GATE slot i as its own streams
    in the update                finish the update of i      mark OPEN: the same
    after the END slot           go on with i + 1            mark OPEN: a replica's memory, and END slot i + 1
    after the mark               go on with i + 1            mark i + 1: its own memory, no byte is moved; END slot i + 1

A rank that is nobody's replica seals its gradients beside the GATE slot: its replacement makes the update itself
(`ftrun.worker.repair.own_update`). The end of a loop comes through here, too, as a step that updates nothing: its gate keeps replicas
alive for a rank that dies in the last update.

Why so:
- The GATE slot comes before the arrival, since the gate may open with it, and then the rank's streams at the gate are needed.
- It is not written before the collectives of the step are over: until then a rank that died in the update before may still need the
  slot that is there, to tell what that update changed. One copy of each slot is enough because of this.
- OPEN is stored before the first write of the update, never later: a mark that is too old costs a copy, one that is too new costs the
  weights. tests/e2e/test_exact.py writes it too early on purpose, and must see other weights.
- Mark and slots are two things since they end at different times: on a GPU the device writes the mark, in stream order, after the
  update, while the host may be in the next forward.

On a GPU what the GATE slot holds is captured while the device still computes the gradients, unless the slot holds gradients itself.
Then the device is waited for. After the wait come a look at the stop, at the one number that the checks had brought to the host, one
copy into the slot, the arrival and the gate: each microsecond there is idle time of the device, since its next kernel is the
update's first. The END slot is captured when the update is queued, and nothing there waits for it. tests/gpu/test_overlap.py counts
what stands where.
"""

from __future__ import annotations

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
        return self._gate.arrive(number)

    def open(self) -> None:
        """The update begins: from here on the memory of this rank is no step's."""
        self._kit.state.arena.open()

    def seal(self, number: int, accumulating: bool) -> None:
        """What comes after gate `number` is done: a replacement begins behind it from here on."""
        kit, tag = self._kit, number + 1
        kit.ledger.end(tag, accumulating)
        kit.state.arena.sealed(tag)

    def tell(self, number: int) -> None:
        """It is sealed: a replacement may wait for that, and after a repair the launcher does."""
        if self._kit.context.stop_pending():
            self._kit.context.board.ring_workers()
        if self._kit.pending.redo is not None:
            self._survivor.step_done(number)
