"""Writes the journal: one JSON line for each fact, buffered until the loop has time.

A full disk costs the journal, never the run: `broken` keeps the first failed write's reason, and later lines are dropped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ftrun.control.events import Action, Event
from ftrun.core.system import files


class Journal:
    """Appends to `path`. `header`, `event` and `note` only buffer; `flush` formats and writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._pending: list[dict[str, Any]] = []
        self.broken: str | None = None

    def header(self, config: dict[str, Any]) -> None:
        run = self._path.parent.name
        self._pending.append({"t": time.monotonic(), "wall": time.time(), "run": run, "config": config})

    def event(self, event: Event, actions: Iterable[Action], phase: str, generation: int) -> None:
        """Add an event, the actions that the machine answered with, and the phase and generation after it."""
        now = time.monotonic()
        self._pending.append({"t": now, "event": event})
        self._pending.append({"t": now, "actions": list(actions), "phase": phase, "generation": generation})

    def note(self, what: str, **facts: Any) -> None:
        """Add a fact that the machine does not need."""
        self._pending.append({"t": time.monotonic(), "note": what, **facts})

    def flush(self) -> None:
        if not self._pending:
            return
        lines, self._pending = self._pending, []
        if self.broken:
            return
        data = "".join(json.dumps(line, default=_plain) + "\n" for line in lines).encode()
        try:
            while data:  # a disk that is nearly full takes only a part
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self.broken = error.strerror

    def copy_to(self, target: Path) -> None:
        """Copy the journal to a file that outlives the run directory.

        Raises:
            OSError: The copy failed.
        """
        self.flush()
        files.copy_private(self._path, target)


def _plain(value: Any) -> Any:
    return value.to_json() if hasattr(value, "to_json") else str(value)
