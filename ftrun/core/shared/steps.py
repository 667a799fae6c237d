"""Logs the times at which a rank entered each phase of its last steps, in a small ring of rows in its board cell. For people.

A row begins with the forward pass and gets a time at each phase change. An interrupted body leaves a row without an end;
the redone step gets a row of its own.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass

from ftrun.core.shared.board import ROW_WORDS, ROWS_KEPT, Cell, F, Phase

_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.GATE, Phase.UPDATE, Phase.DONE)
# words of a row: step index + 1, generation, attempt, then a time for each phase from FORWARD to DONE
_TIME_OF_PHASE_0 = 3 - Phase.FORWARD


@dataclass(frozen=True)
class Row:
    """One attempt at one step. Times in ns (CLOCK_MONOTONIC), 0 = the phase was not reached."""

    step: int
    generation: int
    attempt: int
    forward: int
    backward: int
    gate: int
    update: int
    done: int


class StepLog:
    """The log of the worker that owns `cell`. Its main thread writes it at every phase change, so it must be quick."""

    def __init__(self, cell: Cell) -> None:
        self._words = cell.words()
        self._begun = cell[F.ROWS]
        self._open = 0  # word from which the phases of the open row count, 0 = none is open

    def entered(self, phase: Phase, now: int = 0) -> None:
        """Record that the worker, in the generation of its cell, entered `phase` at `now`, ns; 0 = the current time."""
        now = now or time.monotonic_ns()
        self._words[F.PROGRESS] = now
        self._words[F.PHASE] = phase
        if phase is Phase.FORWARD:
            words, at = self._words, _place(self._begun)
            words[at : at + ROW_WORDS] = array(
                "Q", (words[F.STEP], words[F.GENERATION], words[F.ATTEMPT], now, 0, 0, 0, 0)
            )
            self._begun += 1
            words[F.ROWS] = self._begun
            self._open = at + _TIME_OF_PHASE_0
        elif self._open:
            if phase > Phase.FORWARD:
                self._words[self._open + phase] = now
            if phase < Phase.FORWARD or phase is Phase.DONE:
                self._open = 0


def rows(cell: Cell) -> list[Row]:
    """Return the rows of the last attempts, oldest first. The owner may write meanwhile and replace the oldest one."""
    begun = cell[F.ROWS]
    found, words = [], cell.words()
    for number in range(max(0, begun - ROWS_KEPT), begun):
        step, *rest = words[_place(number) : _place(number) + ROW_WORDS].tolist()
        if step:
            found.append(Row(step - 1, *rest))
    return found


def phase_at(cell: Cell, when: int) -> Phase | None:
    """Return a rank's phase at a time (ns), None if no kept row goes back so far."""
    found: tuple[int, Phase] | None = None
    for row in rows(cell):
        for phase, since in zip(_PHASES, (row.forward, row.backward, row.gate, row.update, row.done), strict=True):
            if since and since <= when and (found is None or since >= found[0]):
                found = since, phase
    return found[1] if found else None


def _place(number: int) -> int:
    return F.FIRST_ROW + number % ROWS_KEPT * ROW_WORDS
