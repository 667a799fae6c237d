"""A model built by a replacement, while everybody waits, is the one that plain python builds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import kill

SCRIPT = harness.SCRIPTS / "built_late.py"


@pytest.mark.parametrize("spares", [0, 1])
def test_every_rank_builds_the_same_model(folder: Path, spares: int) -> None:
    stock = folder / "stock"
    assert harness.finish(harness.start(stock, [sys.executable, str(SCRIPT), str(stock)]), 0).code == 0
    digest = next(stock.glob("plain-*")).read_text()
    ours = folder / "ours"
    command = harness.script_command(ours, SCRIPT, [str(ours)], [kill(2, "update", 3)], spares=spares)
    outcome = harness.finish(harness.start(ours, command))
    assert outcome.code == 0, outcome.tail()
    assert len(harness.deaths(outcome)) == 1, outcome.tail()
    notes = {path.name: path.read_text() for path in ours.glob("[0-3]-*")}
    assert sorted(name[0] for name in notes) == list("01223"), notes
    assert all(note == digest for note in notes.values()), (digest, notes)
