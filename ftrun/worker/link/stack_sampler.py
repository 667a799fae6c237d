"""Where the thread that trains is when it has been in one place for long: what a person asks first about a hung rank.

Runs in the control thread and only reads frames. A rank whose GIL is held cannot say it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ftrun.core.shared.board import Cell, F
from ftrun.worker.link.callers import script_frames
from ftrun.worker.link.position import Position
from ftrun.worker.torch_compat.torch_private import frame_of

_AFTER = 700_000_000  # ns without a sign of life
_AGAIN = 5_000_000_000  # ns until it is looked at once more


class Whereabouts:
    """Leaves RUN_DIR/errors/where-CELL.json for the launcher, through `report(name, facts)`; takes it away when the rank goes on."""

    def __init__(
        self, run_dir: Path, cell: Cell, report: Callable[[str, dict[str, Any]], None], position: Position
    ) -> None:
        self._file = run_dir / "errors" / f"where-{cell.index}.json"
        self._cell = cell
        self._report = report
        self._position = position
        self._told = (0, 0)  # the sign of life after which it was told, and when (ns)

    def look(self) -> None:
        cell, now = self._cell, time.monotonic_ns()
        progress = cell[F.PROGRESS]
        if self._told[0] not in (0, progress):
            self._told = (0, 0)
            with contextlib.suppress(OSError):
                self._file.unlink()
        if now - progress < _AFTER or cell[F.COLLECTIVE_SINCE] or cell.rank is None:
            return
        if self._told[0] == progress and now - self._told[1] < _AGAIN:
            return
        self._told = progress, now
        frame = frame_of(self._position.thread.ident or 0)
        if frame is not None:
            with contextlib.suppress(OSError):
                self._report(f"where-{cell.index}", {"line": _line(frame)})


def _line(frame: FrameType) -> str:
    """The innermost line of the script's own, with the function that it called when that is another's."""
    for at in script_frames(frame):
        inner = "" if at is frame else f" (in {frame.f_code.co_name})"
        return f"{os.path.relpath(at.f_code.co_filename)}:{at.f_lineno}{inner}"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
