"""Report where the training thread is when it stays in one place for long: the first question about a hung rank.

This runs in the control thread and only reads frames. It cannot run while another thread holds the GIL.
"""

from __future__ import annotations

import os
import time
from types import FrameType

from ftrun.core.shared import notes
from ftrun.core.shared.board import F
from ftrun.core.shared.notes import WhereNote
from ftrun.worker.link.callers import script_frames
from ftrun.worker.link.run_link import Context
from ftrun.worker.torch_compat.torch_private import frame_of

_AFTER = 700_000_000  # ns without a sign of life
_AGAIN = 5_000_000_000  # ns until the next report


class Whereabouts:
    """Leaves a WhereNote for the launcher, and removes it when the rank goes on."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._told = (0, 0)  # the last sign of life before the report, and the time of the report (ns)

    def look(self) -> None:
        cell, now = self._context.cell, time.monotonic_ns()
        progress = cell[F.PROGRESS]
        if self._told[0] not in (0, progress):
            self._told = (0, 0)
            notes.remove(WhereNote, self._context.run_dir, cell.index)
        if now - progress < _AFTER or cell[F.COLLECTIVE_SINCE] or cell.rank is None:
            return
        if self._told[0] == progress and now - self._told[1] < _AGAIN:
            return
        self._told = progress, now
        frame = frame_of(self._context.position.thread.ident or 0)
        if frame is not None:
            self._context.note(WhereNote(cell.index, _line(frame), now))


def _line(frame: FrameType) -> str:
    """Return the script's innermost line, with the innermost function if that is not the script's."""
    for at in script_frames(frame):
        inner = "" if at is frame else f" (in {frame.f_code.co_name})"
        return f"{os.path.relpath(at.f_code.co_filename)}:{at.f_lineno}{inner}"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
