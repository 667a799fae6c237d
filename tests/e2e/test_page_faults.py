"""A parked spare takes the page faults of training ahead: one costs some 10 us here, and a fresh process takes thousands."""

from __future__ import annotations

from pathlib import Path

from tests.e2e import harness

SCRIPT = harness.SCRIPTS / "page_faults.py"


def faults(folder: Path, spares: int) -> int:
    command = harness.script_command(folder, SCRIPT, [str(folder), str(spares)], spares=spares)
    outcome = harness.finish(harness.start(folder, command))
    assert outcome.code == 0, outcome.tail()
    assert len(harness.deaths(outcome)) == 1, outcome.tail()
    return int((folder / "faults").read_text())


def test_a_spare_has_taken_most_of_them(folder: Path) -> None:
    fresh, spare = faults(folder / "fresh", 0), faults(folder / "spare", 1)
    assert spare < fresh / 10, (spare, fresh)
