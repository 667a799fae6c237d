"""Who is guilty when the world stands still: the rank that the others wait for.

Reads the board only. A rank that waits in a collective or at the gate is a victim; one that does neither, and gave no
sign of life for the hang timeout, is the suspect. When everybody waits nobody is accused: the links are the suspects.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ftrun.core import gate
from ftrun.core.board import Cell, F, Flag, word_name

_AUTO_LEAST = 60.0  # seconds
_AUTO_FIRST = 1800.0  # seconds, before the length of a step is known: torch's own patience
_AUTO_STEPS = 10.0  # how many times the longest step so far
_KNOWN_AFTER = 3  # gates


class HangWatch:
    """`timeout` seconds, or None to derive it from the longest step."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._last = -1
        self._since = time.monotonic()
        self._longest = 0.0
        self._opened = 0
        self._told = False  # that everybody waits
        self._generation = -1

    @property
    def timeout(self) -> float:
        """What counts as a hang now, seconds."""
        if self._timeout is not None:
            return self._timeout
        return max(_AUTO_LEAST, _AUTO_STEPS * self._longest) if self._opened >= _KNOWN_AFTER else _AUTO_FIRST

    def quiet(self) -> None:
        """The world is being repaired: what it takes is not the length of a step."""
        self._since = time.monotonic()
        self._told = False

    def suspects(self, raw_gate: int, cells: Iterable[Cell]) -> list[Cell]:
        """Those who hold all others up, from the gate word and the cells of every rank."""
        word = gate.unpack(raw_gate)
        now = time.monotonic()
        if word.generation != self._generation:
            self._generation = word.generation
            self.quiet()  # an incident may be over before anybody looks
        if word.last != self._last:
            if self._last >= 0:
                self._longest = max(self._longest, (now - self._since) / max(1, word.last - self._last))
                self._opened += word.last - self._last
            self._last, self._since, self._told = word.last, now, False
        if now - self._since <= self.timeout:
            return []
        ranks = [c for c in cells if not c.has(Flag.LOOP_DONE) and not c.has(Flag.EXITING)]
        waiting = [c for c in ranks if _waits(c, word)]
        oldest = time.monotonic_ns() - int(self.timeout * 1e9)
        if not waiting and len(ranks) > 1:
            return []  # all are busy with something of their own
        return [c for c in ranks if c not in waiting and c.has(Flag.LOOPING) and c[F.PROGRESS] < oldest]

    def stuck(self, raw_gate: int, cells: Sequence[Cell]) -> str:
        """What every rank waits in, "" when not all do or when that was told already. Call after `suspects`."""
        word = gate.unpack(raw_gate)
        if self._told or word.last != self._last or time.monotonic() - self._since <= self.timeout:
            return ""
        oldest = time.monotonic_ns() - int(self.timeout * 1e9)
        inside = [c for c in cells if 0 < c[F.COLLECTIVE_SINCE] < oldest]
        if not inside or not all(c in inside or _waits(c, word) for c in cells):
            return ""
        self._told = True
        return ", ".join(sorted({word_name(c[F.COLLECTIVE_NAME]) for c in inside}))


def _waits(cell: Cell, word: gate.GateWord) -> bool:
    if cell[F.COLLECTIVE_SINCE]:
        return True
    step = cell.step
    return step is not None and word.last < step and cell[F.ARRIVAL] == gate.arrival(word.generation, step)
