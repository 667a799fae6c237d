"""What one incident cost: read from the board's time fields once every rank has done a new step.

Each part is measured from the end of the one before, to the slowest rank, so that the parts sum to the whole.
Never decides anything; it is read by people and by the benchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ftrun.core.shared.board import Board, Cell, F, Source
from ftrun.core.shared.moment import Moment

PARTS = ("detect", "stop", "clean", "reset", "restore", "resume", "first_step")
_FIELDS = (
    ("stop", F.STOPPED, F.STOPPED_NS),
    ("clean", F.CLEANED, F.CLEANED_NS),
    ("reset", F.RESET, F.RESET_NS),
    ("restore", F.RESTORED, F.RESTORED_NS),
    ("resume", F.RESUMED, F.RESUMED_NS),
    ("first_step", F.FIRST_DONE, F.FIRST_DONE_NS),
)
_AS_THEY_ARE = ("generation", "resume", "redone", "restart", "rollback", "survivors", "last", "stuck", "spares")


@dataclass
class Victim:
    """One rank that failed; the fields of a `Moment` say where. `seen_ms`: from the fault to its detection, None when the
    fault's time is not known. `fault` is a value of ftrun.core.faults.Fault, `evidence` a sentence that says how it is known.
    """

    rank: int
    cell: int
    step: int | None
    phase: str
    cause: str
    seen_ms: float | None = None
    fault: str = ""
    evidence: str = ""
    epoch: int | None = None
    end: int = 0

    @classmethod
    def seen(cls, cell: Cell, cause: str, phase: str = "", **more: Any) -> Victim:
        """The worker of `cell`, as its board says; `phase`: the one in which it failed, where it has gone on since."""
        now = Moment.of(cell)
        return cls(
            cell.rank or 0, cell.index, now.step, phase or now.phase, cause, epoch=now.epoch, end=now.end, **more
        )

    @property
    def moment(self) -> Moment:
        return Moment(self.phase, self.step, self.epoch, self.end)


@dataclass
class Incident:
    """From the first failure until every rank has done a step that was never done before. Times in ns, monotonic."""

    began: int
    detected: int
    victims: list[Victim] = field(default_factory=list)
    generation: int = 0
    resume: int = 0
    epoch: int | None = None  # that of `resume`, where the script has epochs
    end: int = 0  # steps of its loop
    then: str = ""  # phase with which all go on, where that is in no step
    redone: int = 0
    restart: bool = False
    rollback: bool = False  # everyone went back to the host snapshot of `resume`
    survivors: int = 0
    fault: str = ""  # of an incident without victims: the links
    evidence: str = ""
    last: int = -1  # step index of the last update that is part of the model
    stuck: str = ""  # the collective that everybody waited in, when no rank was to blame
    spares: list[int] = field(default_factory=list)  # cells that had been warm spares

    def going_on(self) -> Moment:
        """What every rank does once it is repaired."""
        return Moment(self.then, self.resume, None if self.rollback else self.epoch, self.end)

    def facts(self, board: Board, holders: Mapping[int, int]) -> dict[str, Any]:
        """The summary; `holders` maps each rank to its cell."""
        cells = {rank: board.cell(cell) for rank, cell in holders.items()}
        parts = {"detect": max(0.0, (self.detected - self.began) / 1e6)}
        at = max(self.detected, self.began)
        for name, said, when in _FIELDS:
            ends = [c[when] for c in cells.values() if c[said] == self.generation]
            end = max((at, *ends))
            parts[name] = (end - at) / 1e6
            at = end
        replaced = [rank for rank in cells if cells[rank][F.SOURCE] and cells[rank][F.RESTORED] == self.generation]
        return {
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            "fault": self.fault or next((v.fault for v in self.victims), ""),
            "evidence": self.evidence or next((v.evidence for v in self.victims), ""),
            "going_on": vars(self.going_on()),
            "victims": [vars(v) for v in self.victims],
            "sources": {str(rank): _source(cells[rank]) for rank in replaced},
            "ms": {name: round(value, 3) for name, value in parts.items()},
            "total_ms": round((at - self.began) / 1e6, 3),
            "again_ms": 0.0,
            "ranks": {str(rank): self._times(cell) for rank, cell in cells.items()},
            "began_ns": self.began,
            "detected_ns": self.detected,
        }

    def _times(self, cell: Cell) -> dict[str, float]:
        times = {
            name: round((cell[when] - self.began) / 1e6, 3)
            for name, said, when in _FIELDS
            if cell[said] == self.generation
        }
        if cell[F.READY] == self.generation:
            times["ready"] = round((cell[F.READY_NS] - self.began) / 1e6, 3)
        if cell[F.MOVE_SINCE] > self.detected:
            times["moving"] = round((cell[F.MOVE_SINCE] - self.began) / 1e6, 3)
        return times


def _source(cell: Cell) -> dict[str, Any]:
    return {"name": Source(cell[F.SOURCE]).name.lower(), "bytes": cell[F.SOURCE_BYTES], "cell": cell.index}
