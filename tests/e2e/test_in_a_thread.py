"""A script may train in a thread of its own: its spares park there, its stops and its exceptions are those of that thread."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import kill

SCRIPT = harness.SCRIPTS / "in_a_thread.py"


def digests(out: Path) -> list[str]:
    return [(out / f"rank-{rank}.txt").read_text() for rank in range(4)]


@pytest.mark.slow
def test_a_spare_and_a_new_worker_take_over_and_a_busy_survivor_is_stopped(folder: Path) -> None:
    """Rank 0 is busy in Python when rank 1 dies: only an exception in its thread can stop it."""
    stock = [str(SCRIPT), "--backend", "gloo", "--out", str(folder / "stock")]
    assert harness.by_torch(folder / "stock", stock, env={"PYTHONPATH": str(harness.ROOT)}).code == 0
    arguments = ["--backend", "ftrun", "--out", str(folder / "out")]
    faults = [kill(1, "forward", 4), kill(2, "update", 6)]
    ours = harness.script_command(folder / "ours", SCRIPT, arguments, faults, options=("--stop-timeout", "2"))
    outcome = harness.finish(harness.start(folder / "ours", ours))
    assert outcome.code == 0, outcome.tail()
    assert digests(folder / "out") == digests(folder / "stock")
    assert len(harness.deaths(outcome)) == 2 and harness.replaced_ranks(outcome) == {1, 2}, outcome.tail()
    assert outcome.events("Parked"), outcome.tail()
    assert "bit-identical to an uninterrupted run: yes" in outcome.output, outcome.tail()


def test_a_spare_parks_in_the_thread_and_takes_over(folder: Path) -> None:
    """In the main thread it never would: its script ended there, with exit code 0."""
    arguments = ["--backend", "ftrun", "--out", str(folder / "out")]
    ours = harness.script_command(folder, SCRIPT, arguments, [kill(1, "backward", 3)], ranks=2, options=("--stop-timeout", "2"))
    outcome = harness.finish(harness.start(folder, ours))
    assert outcome.code == 0, outcome.tail()
    assert harness.replaced_ranks(outcome) == {1} and outcome.events("Parked"), outcome.tail()
    assert "bit-identical to an uninterrupted run: yes" in outcome.output, outcome.tail()


def test_an_exception_that_ends_the_thread_ends_the_run(folder: Path) -> None:
    """The main thread would leave with exit code 0, and the other ranks would wait for this one for ever."""
    arguments = ["--backend", "ftrun", "--out", str(folder / "out"), "--raise-at", "2"]
    outcome = harness.finish(harness.start(folder, harness.script_command(folder, SCRIPT, arguments, ranks=2, spares=0)))
    assert outcome.code == 1
    assert "ArithmeticError: step 2 cannot be done" in outcome.output
    assert "again after a retry; the run ends" in outcome.output, outcome.tail()
