"""Runs the periodic detectors of the launcher: beats, hangs, stalled repairs, replicas, stragglers, room. Decides nothing.

Each look reads words on the board and turns a fault into an event, or into a condemned worker, with worker and evidence.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ftrun.control import events as ev
from ftrun.control.hangs import Limits, Standstill
from ftrun.control.stragglers import Stragglers
from ftrun.core.faults import Fault
from ftrun.core.shared import gate, replicas
from ftrun.core.shared.board import F, Phase, sum_of
from ftrun.host.base.context import LaunchContext
from ftrun.host.detect.disk_space import RoomWatch
from ftrun.host.detect.hang import HangWatch, WorldNodes
from ftrun.host.detect.heartbeat import LOOKS, Beat, BeatWatch
from ftrun.host.detect.repairs import RepairWatch
from ftrun.host.workers.pool import Worker, WorkerPool

_NOW_AND_THEN = 1.0  # seconds between two looks of the less urgent detectors
_NAMES = {
    Fault.HANG: "no progress",
    Fault.GIL: "no progress, the GIL is held",
    Fault.COLLECTIVE: "missing in a collective",
}


class Detectors:
    """Runs all detectors of one run."""

    def __init__(self, context: LaunchContext, pool: WorkerPool, nodes: WorldNodes) -> None:
        settings = context.settings
        self._board = context.board
        self._pool = pool
        self._emit = context.listener.on_event
        self._beats: BeatWatch[int] = BeatWatch(settings.heartbeat_interval)
        self._timeout = settings.heartbeat_timeout
        limits = Limits(settings.hang_timeout, settings.hang_floor, settings.hang_ceiling)
        self._hangs = HangWatch(limits, self._beats.longest, context.run_dir, nodes)
        self._repairs = RepairWatch(context, pool, self._hangs.where)
        self._stragglers = Stragglers()
        self._often = settings.heartbeat_interval / LOOKS
        self._room = RoomWatch({"lines of the workers' logs": context.logs, "the journal": context.run_dir})
        self._compared: set[tuple[int, int, tuple[int, ...]]] = set()  # generation, gate number and workers of the last comparisons
        self._work: tuple[int, int] = (-1, -1)  # generation and gate number of the last step whose times were read
        self._differing = False  # differing replicas were reported
        self._later = 0.0

    @property
    def pause(self) -> float:
        """Return the seconds until the next look."""
        return min(self._beats.pause, self._hangs.due, self._often if self._stragglers.curious else self._beats.longest)

    @property
    def standstill(self) -> Standstill | None:
        """Return the standstill that the last look detected; None while a rank makes progress."""
        return self._hangs.standstill

    def where(self, cell: int, still: float) -> str:
        """Return the line of the script that a rank has been in; see `HangWatch.where`."""
        return self._hangs.where(cell, still)

    def close(self) -> None:
        self._room.close()

    def look(
        self, running: bool, generation: int, holders: list[Worker], whole: bool, awaited: Sequence[tuple[int, bool]]
    ) -> None:
        """Run each detector that is due. `running`: no incident is going on; `holders`: workers in the order of their ranks.

        `whole`: every rank of this node has a worker; `awaited`: cells that a repair waits for, see `RepairWatch.look`.
        """
        now = time.monotonic()
        self._repairs.look(generation, awaited)
        if not self._beats.pause:
            for index, evidence in self._beats.silent(filter(None, map(self._beat, self._pool.living())), time.monotonic_ns()):
                self._pool.condemn(self._pool.workers[index], "frozen", Fault.FROZEN, evidence)
        present = [w for w in holders if not w.reported]
        if not running or not present or not whole:
            self._hangs.quiet()
            self._stragglers.forget()
        else:
            self._hung(generation, present)
            self._measure(generation, present)
        if now >= self._later:
            self._later = now + _NOW_AND_THEN
            if running and whole:
                self.compare(generation, present)  # a difference that keeps no gate shut makes no rank ring
            self._pool.expire_kills()
            for fault, evidence in self._room.news():
                self._emit(ev.Noticed(now, None, fault.value, evidence))

    def _beat(self, worker: Worker) -> Beat[int] | None:
        """Return the beat of a worker, None before its first and after its last."""
        at = worker.cell[F.BEAT]
        if worker.reported or worker.lost or not (worker.pid and worker.watch and at):
            return None
        return Beat(worker.index, worker.pid, at, self._timeout, "--heartbeat-timeout")

    def _hung(self, generation: int, present: list[Worker]) -> None:
        raw = self._board.gate()
        verdict = self._hangs.look(raw, [w.cell for w in present])
        if verdict is None:
            return
        for accused in verdict.accused:
            worker = self._pool.workers[accused.cell]
            self._pool.condemn(worker, _NAMES[accused.fault], accused.fault, accused.evidence)
        if not verdict.accused:
            step = gate.unpack(raw).last + 1
            link = Fault.LINK.value
            self._emit(ev.Stuck(time.monotonic(), step, generation, verdict.what, link, verdict.evidence))

    def compare(self, generation: int, present: list[Worker]) -> None:
        """Compare the checksums of replicas at a gate; condemn the worker whose state differs. `present`: workers with no reported end.

        Replicas on several nodes are compared by their ranks, which mark the corrupt ones of their node.
        """
        for worker in [w for w in present if w.cell[F.CORRUPT]]:
            self._condemn_corrupt(worker, f"most of {replicas.size_of(worker.cell[F.REPLICAS])} ranks on all nodes")
        for group in {w.cell[F.REPLICAS] for w in present if w.cell[F.REPLICAS]}:
            those = [w for w in present if w.cell[F.REPLICAS] == group and not w.reported]
            if len(those) >= replicas.size_of(group):
                self._compare_group(generation, those)

    def _condemn_corrupt(self, worker: Worker, others: str) -> None:
        evidence = f"the checksum of its weights and optimizer state differs from that of {others} at the gate of step {worker.cell.step}"
        worker.cell[F.CORRUPT] = 1  # before the next world, in which another rank looks for a replica
        self._pool.condemn(worker, "corrupt", Fault.CORRUPT, evidence)

    def _compare_group(self, generation: int, present: list[Worker]) -> None:
        raw = [w.cell[F.SUM_AT] for w in present]
        sums, words = [w.cell[F.SUM] for w in present], [sum_of(r) for r in raw]
        at = words[0][0]
        if [w.cell[F.SUM_AT] for w in present] != raw:
            return  # a rank is writing its checksum
        compared = generation, at, tuple(w.index for w in present)  # a new rank may publish after a comparison of the others
        if at < 0 or compared in self._compared or any(number != at for number, _ in words):
            return
        self._compared = {one for one in self._compared if one[:2] == compared[:2]} | {compared}
        trusted = [t for _, t in words]
        guilty = replicas.corrupt(sums, trusted)
        for index in guilty:
            self._condemn_corrupt(present[index], f"{len(sums) - len(guilty)} of {len(sums)} ranks")
        if replicas.undecided(sums, trusted) and not self._differing:
            self._differing = True
            step = present[0].cell.step
            evidence = (
                f"the weights of {len(sums)} ranks differ at the gate of step {step}, and no majority says who is wrong"
            )
            self._emit(ev.Noticed(time.monotonic(), None, Fault.CORRUPT.value, evidence))

    def _measure(self, generation: int, present: list[Worker]) -> None:
        last = gate.unpack(self._board.gate()).last
        cells = [w.cell for w in present]
        if (generation, last) == self._work or any(c[F.PHASE] in (Phase.START, Phase.GATE) for c in cells):
            return
        self._work = generation, last
        work = {w.rank: w.cell[F.WORK] / 1e9 for w in present if w.rank is not None}
        for rank, evidence in self._stragglers.step(last, work):
            cell = next(w.index for w in present if w.rank == rank)
            self._emit(ev.Noticed(time.monotonic(), cell, Fault.STRAGGLER.value, evidence))
