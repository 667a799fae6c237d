"""What the journal says of a rank that raised, when the launcher comes late to look at it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ftrun.control.events import CloseGate, Died, Grouped, Protected, Publish, Raised, Say
from ftrun.control.machine import RunPhase as State
from ftrun.core.shared import gate
from ftrun.core.shared.board import F, Flag, Inexact, Phase
from ftrun.core.shared.steps import StepLog
from ftrun.host.account.attempt import Attempt
from ftrun.host.account.incident_reporter import Narrator
from tests.host.parts import Recorder, launch_context

MS = 1_000_000


def test_a_rank_that_raised_is_told_as_it_was_then(tmp_path: Path) -> None:
    """It raised in its backward pass; by now all ranks were reset, and it is in the forward pass of the step again."""
    recorder = Recorder()
    context = launch_context(tmp_path, recorder, nproc=2)
    board, narrator = context.board, Narrator(context)
    for index in range(2):
        cell, log = board.cell(index), StepLog(board.cell(index))
        cell[F.RANK], cell[F.STEP], cell[F.PHASE] = index + 1, 8, Phase.FORWARD
        for phase, at in ((Phase.FORWARD, 100), (Phase.BACKWARD, 110), (Phase.IDLE, 121), (Phase.FORWARD, 150)):
            cell[F.GENERATION] = 2 if at == 150 else 1
            log.entered(phase, at * MS)
        for k, (said, when) in enumerate(((F.STOPPED, F.STOPPED_NS), (F.CLEANED, F.CLEANED_NS), (F.RESET, F.RESET_NS))):
            cell[said], cell[when] = 2, (125 + 5 * k) * MS
    board.cell(0)[F.RAISED_NS] = 120 * MS
    narrator.holders = {0: 0, 1: 1}
    narrator.saw(Raised(0.123, 0, 7, "ValueError at x.py:1"), (CloseGate(2),), State.STOPPING, "STOPPING", 2, 122 * MS, 0.122)
    narrator.published(Publish(2, 7, (0, 1), (), ()), {})
    narrator.saw(Grouped(0.2, 3), (Say("recovered"),), State.RUNNING, "RUNNING", 2, 200 * MS, 0.2)
    (incident,) = (note for note in recorder.notes if note["note"] == "incident")
    (victim,) = incident["victims"]
    assert (victim["rank"], victim["phase"], victim["seen_ms"]) == (0, "backward", 2.0)
    parts = incident["ms"]
    assert (parts["detect"], parts["stop"], parts["clean"], parts["reset"]) == (2.0, 3.0, 5.0, 5.0)
    assert incident["moves"] == []


def test_what_a_replacement_notes_outlives_it(tmp_path: Path) -> None:
    """It adopted something in a way that nobody can prove, and dies before the incident is over."""
    context = launch_context(tmp_path, Recorder(), nproc=2)
    narrator = Narrator(context)
    narrator.published(Publish(1, 0, (0, 1), (), (), fresh=True), {})
    narrator.published(Publish(2, 3, (0, 2), (1,), ()), {})
    context.board.cell(2)[F.INEXACT] = Inexact.UPDATE_USED_RNG
    narrator.published(Publish(3, 4, (0, 3), (1,), ()), {})
    assert narrator.inexact == Inexact.UPDATE_USED_RNG


@pytest.mark.parametrize(("goes_on_with", "again"), [(0, 10), (6, 4)])
def test_a_restart_counts_the_steps_that_are_done_again(tmp_path: Path, goes_on_with: int, again: int) -> None:
    """From its beginning, or from where a checkpoint of the script's own goes on; and the time that they had taken."""
    recorder = Recorder()
    context = launch_context(tmp_path, recorder, nproc=2)
    board, narrator = context.board, Narrator(context)

    def protect(cells: tuple[int, ...], first: int) -> None:
        narrator.published(Publish(1, 0, cells, (), (), fresh=True), {})
        narrator.saw(Grouped(0.0, cells[0]), (), State.RUNNING, "RUNNING", 1, 0, 0.0)
        for rank, index in enumerate(cells):
            cell = board.cell(index)
            cell[F.RANK], cell[F.FLAGS] = rank + 1, Flag.PROTECTED
            cell.set_shift(first)
            narrator.saw(Protected(0.0, index), (), State.RUNNING, "RUNNING", 1, 0, 0.0)

    began = time.monotonic_ns()
    protect((0, 1), 0)
    assert board.swap_gate(board.gate(), gate.pack(gate.GateWord(1, False, 8)))
    for index in range(2):
        board.cell(index)[F.STEP] = 9 + 1  # one step is in flight
    time.sleep(0.05)
    now, died = time.monotonic_ns(), Died(0.0, 1, "SIGKILL", 137)
    narrator.saw(died, (Say("restarting", 1, 1, "SIGKILL"),), State.RESTARTING, "RESTARTING", 2, now, now / 1e9)
    took = (time.monotonic_ns() - began) / 1e6
    assert board.swap_gate(board.gate(), gate.pack(gate.GateWord(2, False, -1)))
    protect((2, 3), goes_on_with)
    (incident,) = (note for note in recorder.notes if note["note"] == "incident")
    assert incident["restart"] and incident["redone"] == again
    assert 50 * again / 10 <= incident["again_ms"] <= took * again / 10
    assert any(f"{again} steps done again since all workers started again" in line for line in recorder.lines)
    narrator.end(0)
    summary = recorder.notes[-1]
    assert summary["redone"] == again
    assert summary["lost_ms"] == pytest.approx(incident["total_ms"] + incident["again_ms"])


def test_an_ended_loop_is_no_step() -> None:
    attempt = Attempt()
    attempt.begin(0, 0)
    attempt.repairs_ms = 10.0
    assert attempt.steps(22, 2) == 20 and attempt.step_ms(22, 2, 50 * MS) == 2.0
    assert Attempt().steps(22, 0) == 0 and Attempt().step_ms(22, 0, 50 * MS) == 0.0
