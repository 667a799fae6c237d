"""A progress bar on stderr for work that takes long; without a terminal one line for each part of the work, when it is done."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from ftrun.core.text import printable, tell


class ProgressBar:
    """`with Progress("verify") as progress:` `begin(part)`, `show(done, total)` while it goes on, `done(line)` at its end."""

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
            # refreshed by hand: a thread would be in the way of starting processes
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, part: str) -> None:
        """A part of unknown length begins."""
        if self._bar is not None:
            self._task = self._bar.add_task(f"{self._what}: {part}", total=None)
            self._bar.refresh()

    def show(self, done: int, total: int) -> None:
        """`total` 0: not known yet."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total or None, refresh=True)

    def done(self, line: str) -> None:
        """The part is over; the line stays."""
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
            self._bar.console.print(printable(f"ftrun: {self._what}: {line}"), highlight=False, markup=False)
        else:
            tell(f"{self._what}: {line}")
