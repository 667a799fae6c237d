"""Defines the objects that the parts of one run's launcher share: its settings, places and loop, and the listener for their reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ftrun.control.events import Event
from ftrun.core.shared.board import Board
from ftrun.host.base.loop import EventLoop
from ftrun.host.base.settings import Settings

SERVICES_LOG = "services.log"  # in the log folder: the output of our helpers


class Listener(Protocol):
    """Takes the reports of all parts. No event takes effect before the caller has returned to the loop."""

    def on_event(self, event: Event) -> None:
        """Queue an event for the machine."""

    def note(self, what: str, **facts: Any) -> None:
        """Journal a fact that the machine does not need."""

    def log(self, line: str, level: str = "info") -> None:
        """Print a message for the user; `level`: info, warning or error."""


@dataclass(frozen=True)
class LaunchContext:
    """The shared objects of one run. `logs`: the folder of its logs."""

    settings: Settings
    run_dir: Path
    logs: Path
    board: Board
    loop: EventLoop
    listener: Listener

    @property
    def logs_kept(self) -> bool:
        """Do the logs outlive the run?"""
        return self.run_dir not in self.logs.parents
