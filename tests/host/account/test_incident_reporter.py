"""What the journal says of a rank that raised, when the launcher comes late to look at it."""

from __future__ import annotations

from pathlib import Path

from ftrun.control.events import CloseGate, Grouped, Publish, Raised, Say
from ftrun.control.machine import RunPhase as State
from ftrun.core.shared.board import F, Phase
from ftrun.core.shared.steps import StepLog
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
            log.entered(phase, 2 if at == 150 else 1, at * MS)
        for k, (said, when) in enumerate(((F.STOPPED, F.STOPPED_NS), (F.CLEANED, F.CLEANED_NS), (F.RESET, F.RESET_NS))):
            cell[said], cell[when] = 2, (125 + 5 * k) * MS
    board.cell(0)[F.RAISED_NS] = 120 * MS
    narrator.holders = {0: 0, 1: 1}
    narrator.saw(Raised(0.123, 0, 7, "ValueError at x.py:1"), (CloseGate(2),), State.STOPPING, 122 * MS)
    narrator.published(Publish(2, 7, (0, 1), (), ()), {})
    narrator.saw(Grouped(0.2, 3), (Say("recovered"),), State.RUNNING, 200 * MS)
    (incident,) = (note for note in recorder.notes if note["note"] == "incident")
    (victim,) = incident["victims"]
    assert (victim["rank"], victim["phase"], victim["seen_ms"]) == (0, "backward", 2.0)
    parts = incident["ms"]
    assert (parts["detect"], parts["stop"], parts["clean"], parts["reset"]) == (2.0, 3.0, 5.0, 5.0)
    assert incident["moves"] == []
