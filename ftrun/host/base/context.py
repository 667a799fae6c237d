"""The things that the parts of one run's launcher share: the place of the run, and the listener to whom they report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ftrun.control.events import Event
from ftrun.core.shared.board import Board
from ftrun.host.base.loop import EventLoop
from ftrun.host.base.settings import Settings

SERVICES_LOG = "services.log"  # in the log folder: what our helpers print


class Listener(Protocol):
    """Takes everything that a part learns. It acts on nothing before the caller has returned to the loop."""

    def on_event(self, event: Event) -> None:
        """The machine decides about it."""

    def note(self, what: str, **facts: Any) -> None:
        """A fact for the journal, which the machine does not need."""

    def log(self, line: str, level: str = "info") -> None:
        """A sentence for the person at the terminal; `level`: info, warning or error."""


@dataclass(frozen=True)
class LaunchContext:
    """One run. `logs`: the folder of its logs."""

    settings: Settings
    run_dir: Path
    logs: Path
    board: Board
    loop: EventLoop
    listener: Listener

    @property
    def logs_kept(self) -> bool:
        """Do they outlive the run?"""
        return self.run_dir not in self.logs.parents
