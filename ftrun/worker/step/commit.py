"""The protocol of a commit: the order of writes with which a step becomes part of the training.

    GATE slot -> arrive -> (gate opens) -> memory OPEN -> update -> END slot -> commit mark -> bells

Theory of operation. A replacement of this rank sees three things that outlive it: the slots, the commit mark of the arena, the gate
word. The order above makes each place of a death readable from them:

    it died                      the others                  its replacement finds and takes
    before its arrival           do step i again             mark i: its own memory; START slot i (END slot i before the hand-out)
    arrived, gate still shut     do step i again             the same: the launcher closes the gate, the arrival does not count
    gate open, mark still i      finish the update of i      mark i is too old: a replica's memory, and GATE slot i as its own streams
    in the update                finish the update of i      mark OPEN: the same
    after the END slot           go on with i + 1            mark OPEN: a replica's memory, and END slot i + 1
    after the mark               go on with i + 1            mark i + 1: its own memory, no byte is moved; END slot i + 1

A rank without replica seals its gradients beside the GATE slot: its replacement makes the update itself
(`ftrun.worker.repair.own_update`). The end of a loop commits here, too, as a step that updates nothing: its gate keeps replicas
alive for a rank that dies in the last update.

Reasons for this order:
- The GATE slot comes before the arrival, since the gate may open with it, and then the rank's streams at the gate are needed.
- The rank writes it only after the collectives of the step: until then the replacement of a rank that died in the update before may
  need the previous content, to tell what that update changed. So one copy of each slot is enough.
- The rank stores OPEN before the first write of the update, never later: a mark that is too old costs a copy, one that is too new
  costs the weights. tests/e2e/test_exact.py writes it too early on purpose, and must see other weights.
- Mark and slots are separate since they end at different times: on a GPU the device writes the mark, in stream order, after the
  update, while the host may be in the next forward.

On a GPU the rank captures the GATE slot's content while the device still computes the gradients, unless the slot holds gradients.
Then it waits for the device. After that wait it checks for a stop, checks the one number that the observers had copied to the host,
copies once into the slot, arrives and passes the gate: each microsecond there is idle time of the device, whose next kernel is the
update's first. The rank captures the END slot when it has queued the update, and does not wait. tests/gpu/test_overlap.py counts the
calls in each of these stretches.
"""

from __future__ import annotations

from ftrun.worker.repair.kit import Kit
from ftrun.worker.repair.survivor import Survivor
from ftrun.worker.step.gate import Gate


class Commit:
    """The commits of one rank; `number` is a gate number."""

    def __init__(self, kit: Kit, survivor: Survivor) -> None:
        self._kit = kit
        self._survivor = survivor
        self._gate = Gate(kit)
        self.record = kit.ledger.record_gate  # the first write: it captures what a replacement needs from the gate on

    def arrive(self, number: int) -> bool:
        """Seal the GATE slot, arrive, and wait. True = passed, False = the launcher stopped the world first.

        Raises:
            WorkerError: If the run ends and the gate cannot open any more.
        """
        self._kit.ledger.seal_gate()
        return self._gate.arrive(number)

    def open(self) -> None:
        """Store OPEN, since the update begins: the memory of this rank now belongs to no step."""
        self._kit.state.arena.open()

    def seal(self, number: int, accumulating: bool) -> None:
        """Seal the state after gate `number`, so that a replacement begins behind it from now on."""
        kit, tag = self._kit, number + 1
        kit.ledger.end(tag, accumulating)
        kit.state.arena.sealed(tag)

    def tell(self, number: int) -> None:
        """Announce the seal: a replacement may wait for it, and after a repair the launcher does."""
        if self._kit.context.stop_pending():
            self._kit.context.board.ring_workers()
        if self._kit.pending.redo is not None:
            self._survivor.step_done(number)
