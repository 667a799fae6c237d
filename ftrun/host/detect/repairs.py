"""Feeds `ftrun.control.stalls` with the signs of progress of the ranks that a repair waits for, and warns the user. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ftrun.control.events import Stalled
from ftrun.control.stalls import Awaited, Stalls, Wait
from ftrun.core import text
from ftrun.core.amounts import size
from ftrun.core.shared.board import Cell, F
from ftrun.host.base.context import LaunchContext
from ftrun.host.detect.hang import debugged
from ftrun.host.detect.work import Work
from ftrun.host.workers.pool import WorkerPool

_SIGNS = (
    *(F.FLAGS, F.PROGRESS, F.PHASE, F.STEP, F.ENDS, F.COLLECTIVE, F.COLLECTIVE_SINCE, F.COLLECTIVE_ENDED, F.MOVED),
    *(F.STOPPED, F.CLEANED, F.READY, F.RESET, F.RESTORED, F.RESUMED, F.SOURCE, F.SETTLED, F.RANK, F.PID),
)
_WROTE_LATELY = 6.0  # seconds; a rank that stands still notes its line again after 5


class RepairWatch:
    """Watches the repairs of one run. `where(cell, seconds)` returns the line of the script that a rank noted in the last `seconds`."""

    def __init__(self, context: LaunchContext, pool: WorkerPool, where: Callable[[int, float], str]) -> None:
        self._board = context.board
        self._pool = pool
        self._where = where
        self._emit = context.listener.on_event
        self._log = context.listener.log
        self._work = Work()
        self._stalls = Stalls(context.settings.recover_timeout)

    def look(self, generation: int, awaited: Sequence[tuple[int, bool]]) -> None:
        """Look, if it is time. `awaited`: cells that the repair into `generation` waits for, and whether each runs its script's code."""
        now = time.monotonic()
        if not awaited or not self._stalls.due(now, generation):
            return
        cells = [self._board.cell(cell) for cell, _ in awaited]
        pids = {cell.index: self._pid(cell) for cell in cells}
        work = self._work.done(pids.values())
        seen = [
            # a worker that is not forked yet waits for the fork server, which HelperWatch watches
            Awaited(cell.index, _mark(cell, now, not pids[cell.index]), work.get(pids[cell.index], 0.0), patient)
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
        latest = max(waits, key=lambda w: w.limit - w.still)  # the repair is given up only when the last one's time is over
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


def _mark(cell: Cell, now: float, excused: bool) -> tuple[int, ...]:
    """Return a value that changes with every sign of progress, and every second for a rank that is excused or held by a debugger."""
    return (*(cell[word] for word in _SIGNS), int(now) if excused or (cell[F.PID] and debugged(cell)) else 0)
