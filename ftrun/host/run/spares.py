"""Delays the start of spares to a quiet moment, because a fork would slow the step that all ranks wait for."""

from __future__ import annotations

import time
from collections.abc import Callable

from ftrun.control.events import Spawn
from ftrun.core.shared import gate
from ftrun.host.base.context import LaunchContext

_LOOK = 0.05  # seconds between two checks that spares may start
_PATIENCE = 3.0  # seconds after which they start in any case: the script may never make a step


class Spares:
    """Holds the spares that wait for their start. `settled` tells whether no incident is going on; `start` forks one spare."""

    def __init__(self, context: LaunchContext, settled: Callable[[], bool], start: Callable[[Spawn], None]) -> None:
        self._context = context
        self._settled = settled
        self._start = start
        self._due: list[Spawn] = []

    def add(self, action: Spawn) -> None:
        if not self._due:
            self._look_later(time.monotonic() + _PATIENCE)
        self._due.append(action)

    def _look_later(self, latest: float) -> None:
        self._context.loop.after(_LOOK, lambda: self._look(latest))

    def _look(self, latest: float) -> None:
        stepped = gate.unpack(self._context.board.gate()).last >= 0
        if not (self._settled() and stepped) and time.monotonic() < latest:
            self._look_later(latest)
            return
        due, self._due = self._due, []
        for action in due:
            self._start(action)
