"""Measures the cost of one incident from the board's time fields, once every rank has done a new step.

Each part lasts from the end of the previous one until the slowest rank is done, so that the parts sum to the whole.
This file decides nothing; people and the benchmarks read its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftrun.core.account import Incident, Victim
from ftrun.core.shared.board import Board, Cell, F, Source
from ftrun.core.shared.moment import Moment

_FIELDS = (
    ("stop", F.STOPPED, F.STOPPED_NS),
    ("clean", F.CLEANED, F.CLEANED_NS),
    ("reset", F.RESET, F.RESET_NS),
    ("restore", F.RESTORED, F.RESTORED_NS),
    ("resume", F.RESUMED, F.RESUMED_NS),
    ("first_step", F.FIRST_DONE, F.FIRST_DONE_NS),
)
_AS_THEY_ARE = ("generation", "resume", "redone", "restart", "rollback", "survivors", "last", "stuck")


def seen(cell: Cell, cause: str, phase: str = "", **more: Any) -> Victim:
    """Return the victim in `cell`, as the board describes it. `phase`: the one in which it failed, if it has moved on since."""
    now = Moment.of(cell)
    return Victim(cell.rank or 0, cell.index, now.step, phase or now.phase, cause, epoch=now.epoch, end=now.end, **more)


def measured(incident: Incident, board: Board, holders: Mapping[int, int]) -> dict[str, Any]:
    """Return the facts of the incident for the journal; `holders` maps each rank to its cell."""
    cells = {rank: board.cell(cell) for rank, cell in holders.items()}
    parts = {"detect": max(0.0, (incident.detected - incident.began) / 1e6)}
    at = max(incident.detected, incident.began)
    for name, said, when in _FIELDS:
        ends = [c[when] for c in cells.values() if c[said] == incident.generation]
        end = max((at, *ends))
        parts[name] = (end - at) / 1e6
        at = end
    replaced = [rank for rank in cells if cells[rank][F.SOURCE] and cells[rank][F.RESTORED] == incident.generation]
    return {
        **{name: getattr(incident, name) for name in _AS_THEY_ARE},
        "spares": list(incident.spares),
        "fault": incident.fault or next((v.fault for v in incident.victims), ""),
        "evidence": incident.evidence or next((v.evidence for v in incident.victims), ""),
        "going_on": vars(incident.going_on()),
        "victims": [vars(v) for v in incident.victims],
        "sources": {str(rank): _source(cells[rank]) for rank in replaced},
        "ms": {name: round(value, 3) for name, value in parts.items()},
        "total_ms": round((at - incident.began) / 1e6, 3),
        "again_ms": 0.0,
        "ranks": {str(rank): _times(incident, cell) for rank, cell in cells.items()},
        "began_ns": incident.began,
        "detected_ns": incident.detected,
    }


def _times(incident: Incident, cell: Cell) -> dict[str, float]:
    def after(when: int) -> float:
        return round((cell[when] - incident.began) / 1e6, 3)

    times = {name: after(when) for name, said, when in _FIELDS if cell[said] == incident.generation}
    if cell[F.READY] == incident.generation:
        times["ready"] = after(F.READY_NS)
    if cell[F.MOVE_SINCE] > incident.detected:
        times["moving"] = after(F.MOVE_SINCE)
    return times


def _source(cell: Cell) -> dict[str, Any]:
    return {"name": Source(cell[F.SOURCE]).name.lower(), "bytes": cell[F.SOURCE_BYTES], "cell": cell.index}
