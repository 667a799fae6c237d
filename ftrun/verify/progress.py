"""Shows a progress bar on stderr; without a terminal it prints one line at the end of each part of the work."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from ftrun.core.text import printable, tell


class ProgressBar:
    """A context manager: call `begin(part)`, `show(done, total)` while the part runs, and `done(line)` at its end."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> ProgressBar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            # refresh by hand: a refreshing thread would make it unsafe to fork a process
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, part: str) -> None:
        """Begin a part of unknown length."""
        if self._bar is not None:
            self._task = self._bar.add_task(f"{self._what}: {part}", total=None)
            self._bar.refresh()

    def show(self, done: int, total: int) -> None:
        """Show the progress of the part. `total` 0 = not known yet."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total or None, refresh=True)

    def done(self, line: str) -> None:
        """End the part and print `line`, which stays on the screen."""
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
            self._bar.console.print(printable(f"ftrun: {self._what}: {line}"), highlight=False, markup=False)
        else:
            tell(f"{self._what}: {line}")
