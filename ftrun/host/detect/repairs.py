"""Feeds `ftrun.control.stalls` with what the board and the kernel show of the ranks that a repair waits for, and tells a person.

Nothing is decided here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ftrun.control.events import Stalled
from ftrun.control.stalls import Awaited, Stalls, Wait
from ftrun.core import text
from ftrun.core.amounts import size
from ftrun.core.shared.board import Cell, F
from ftrun.core.system.procfs import stat
from ftrun.host.base.context import LaunchContext
from ftrun.host.detect.hang import debugged
from ftrun.host.workers.pool import WorkerPool

_SIGNS = (
    *(F.FLAGS, F.PROGRESS, F.PHASE, F.STEP, F.ENDS, F.COLLECTIVE, F.COLLECTIVE_SINCE, F.COLLECTIVE_ENDED, F.MOVED),
    *(F.STOPPED, F.CLEANED, F.READY, F.RESET, F.RESTORED, F.RESUMED, F.SOURCE, F.SETTLED, F.RANK, F.PID),
)
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_READING = 0.05 / (1 << 20)  # seconds of work that a byte read is worth: half a MiB a second counts as busy
_WROTE_LATELY = 6.0  # seconds: a rank that is still says again where it is after 5


class RepairWatch:
    """One per run. `where(cell, seconds)`: the line of the script that a rank has been in for so long."""

    def __init__(self, context: LaunchContext, pool: WorkerPool, where: Callable[[int, float], str]) -> None:
        self._board = context.board
        self._pool = pool
        self._where = where
        self._emit = context.listener.on_event
        self._log = context.listener.log
        self._stalls = Stalls(context.settings.recover_timeout)

    def look(self, generation: int, awaited: Sequence[tuple[int, bool]]) -> None:
        """One look. `awaited`: cells that the repair into `generation` waits for, and whether each is in its script's own code."""
        now = time.monotonic()
        if not awaited or not self._stalls.due(now, generation):
            return
        cells = [self._board.cell(cell) for cell, _ in awaited]
        seen = [
            Awaited(cell.index, _mark(cell, now), _work(self._pid(cell)), patient)
            for cell, (_, patient) in zip(cells, awaited, strict=True)
        ]
        waits = self._stalls.look(now, seen, self._pool.longest_start)
        over = all(w.over for w in waits)
        where = self._where(waits[0].cell, _WROTE_LATELY) if len(waits) == 1 else ""
        if over:
            self._emit(Stalled(now, generation, tuple(w.cell for w in waits), min(w.still for w in waits), where))
        elif self._stalls.to_tell(waits):
            self._log(self._sentence(waits, where), "warning")

    def _pid(self, cell: Cell) -> int:
        worker = self._pool.workers.get(cell.index)
        return 0 if worker is None else worker.pid

    def _sentence(self, waits: Sequence[Wait], where: str) -> str:
        cells = [self._board.cell(w.cell) for w in waits]
        ranks = sorted(rank for rank in (self._rank(c) for c in cells) if rank is not None)
        latest = max(waits, key=lambda w: w.limit - w.still)  # nothing is done before its time is over, too
        moved = sum(c[F.MOVED] for c in cells if c[F.MOVE_TOTAL])
        total = sum(c[F.MOVE_TOTAL] for c in cells)
        said = f"the repair waits for {text.ranks(ranks)}, {max(w.waited for w in waits):.0f} s so far"
        said += f", {size(moved)} of {size(total)} copied" if total else ""
        said += f"; no progress for {latest.still:.0f} s" if latest.still >= 1 else ""
        said += f", at {where}" if where else ""
        return f"{said}; it is given up after {latest.limit:.0f} s without any"

    def _rank(self, cell: Cell) -> int | None:
        worker = self._pool.workers.get(cell.index)
        return cell.rank if worker is None else worker.rank


def _mark(cell: Cell, now: float) -> tuple[int, ...]:
    """A rank that somebody looks into with a debugger takes its time."""
    return (*(cell[word] for word in _SIGNS), int(now) if cell[F.PID] and debugged(cell) else 0)


def _work(pid: int) -> float:
    """Seconds that the processes of a worker have worked so far; it leads their group."""
    if not pid:
        return 0.0
    ticks = 0
    for entry in os.listdir("/proc"):
        fields = stat(entry) if entry.isdigit() else None
        if fields is not None and (int(fields[2]) == pid or int(entry) == pid):
            ticks += sum(map(int, fields[11:15]))
    return ticks * _TICK + _bytes_read(pid) * _READING


def _bytes_read(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0  # it is gone, or this kernel does not count
    return int(lines[0].partition(":")[2]) if lines else 0
