"""When a rank was in which phase of its last steps: a small ring of rows in its board cell. For people; decides nothing.

A row is begun with the forward pass and gets a time at each phase change. A body that was interrupted leaves a row
without an end; the step done again gets a row of its own.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass

from ftrun.core.board import ROW_WORDS, ROWS_KEPT, Cell, F, Phase

_TIMES = (Phase.FORWARD, Phase.BACKWARD, Phase.GATE, Phase.UPDATE, Phase.DONE)
_FIRST_TIME = 3  # words before the times: step index + 1, generation, attempt
_WORD_OF = {phase: _FIRST_TIME + at for at, phase in enumerate(_TIMES)}


@dataclass(frozen=True)
class Row:
    """One attempt at one step. Times in ns (CLOCK_MONOTONIC), 0 = it never came so far."""

    step: int
    generation: int
    attempt: int
    forward: int
    backward: int
    gate: int
    update: int
    done: int


class StepLog:
    """Written by the worker that owns `cell`, from its main thread."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._begun = cell[F.ROWS]
        self._open = False

    def entered(self, phase: Phase, generation: int) -> None:
        """The worker is in `phase` from now on."""
        if phase is Phase.FORWARD:
            cell = self._cell
            row = (cell[F.STEP], generation, cell[F.ATTEMPT], time.monotonic_ns(), 0, 0, 0, 0)
            cell.write(_place(self._begun), array("Q", row))
            self._begun += 1
            cell[F.ROWS] = self._begun
            self._open = True
        elif self._open:
            word = _WORD_OF.get(phase)
            if word is not None:
                at = _place(self._begun - 1) + word
                self._cell.write(at, array("Q", (time.monotonic_ns(),)))
            self._open = word is not None and phase is not Phase.DONE


def rows(cell: Cell) -> list[Row]:
    """What is kept of the last attempts, oldest first. The owner may write meanwhile: the oldest one may be replaced."""
    begun = cell[F.ROWS]
    found = []
    for number in range(max(0, begun - ROWS_KEPT), begun):
        step, *rest = cell.read(_place(number), ROW_WORDS)
        if step:
            found.append(Row(step - 1, *rest))
    return found


def _place(number: int) -> int:
    return F.FIRST_ROW + number % ROWS_KEPT * ROW_WORDS
