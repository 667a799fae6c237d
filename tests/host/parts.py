"""Parts of the launcher by themselves, without a run around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftrun.control.events import Event
from ftrun.core import paths
from ftrun.core.shared.board import Board
from ftrun.host.base.context import LaunchContext
from ftrun.host.base.loop import EventLoop
from ftrun.host.base.settings import Settings


class Recorder:
    """A listener that keeps what it is told; `on_event` may be given."""

    def __init__(self, on_event: Callable[[Event], None] = lambda event: None) -> None:
        self.on_event = on_event
        self.notes: list[dict[str, Any]] = []
        self.lines: list[str] = []

    def note(self, what: str, **facts: Any) -> None:
        self.notes.append({"note": what, **facts})

    def log(self, line: str, level: str = "info") -> None:
        self.lines.append(line)


def launch_context(folder: Path, listener: Recorder, nproc: int = 1) -> LaunchContext:
    """A run in `folder` with a board of its own."""
    board = Board.create(folder / paths.BOARD, 8)
    return LaunchContext(Settings(argv=("train.py",), nproc=nproc), folder, folder, board, EventLoop(), listener)
