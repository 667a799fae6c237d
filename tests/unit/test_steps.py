"""The ring of a rank's last steps: what it says of a moment that is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftrun.core.shared.board import Board, Cell, F, Phase
from ftrun.core.shared.steps import StepLog, phase_at, rows


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    return Board.create(tmp_path / "board", 2).cell(1)


def do(log: StepLog, cell: Cell, step: int, times: dict[Phase, int]) -> None:
    cell[F.STEP] = step + 1
    for phase, now in times.items():
        log.entered(phase, now)


def test_the_phase_at_a_time_that_is_over(cell: Cell) -> None:
    log = StepLog(cell)
    do(log, cell, 4, {Phase.FORWARD: 100, Phase.BACKWARD: 200, Phase.GATE: 300, Phase.UPDATE: 400, Phase.DONE: 500})
    do(log, cell, 5, {Phase.FORWARD: 600, Phase.BACKWARD: 700, Phase.IDLE: 750})
    do(log, cell, 5, {Phase.FORWARD: 800})  # it raised, and is in the step again
    assert [row.step for row in rows(cell)] == [4, 5, 5]
    expected = {100: Phase.FORWARD, 299: Phase.BACKWARD, 450: Phase.UPDATE, 720: Phase.BACKWARD, 900: Phase.FORWARD}
    assert {when: phase_at(cell, when) for when in expected} == expected
    assert phase_at(cell, 99) is None
