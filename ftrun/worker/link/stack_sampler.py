"""Where the thread that trains is when it has been in one place for long: what a person asks first about a hung rank.

Runs in the control thread and only reads frames. A rank whose GIL is held cannot say it.
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
_AGAIN = 5_000_000_000  # ns until it is looked at once more


class Whereabouts:
    """Leaves a WhereNote for the launcher, and takes it away when the rank goes on."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._told = (0, 0)  # the sign of life after which it was told, and when (ns)

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
    """The innermost line of the script's own, with the function that it called when that is another's."""
    for at in script_frames(frame):
        inner = "" if at is frame else f" (in {frame.f_code.co_name})"
        return f"{os.path.relpath(at.f_code.co_filename)}:{at.f_lineno}{inner}"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
