"""A repair never waits for ever: a line says for whom, another worker gets the rank, and the second time the run ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import kill

SCRIPT = harness.SCRIPTS / "stands_still.py"


def run(folder: Path, *arguments: str, faults: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> harness.Outcome:
    every = [*arguments, "--out", str(folder / "out")]
    command = harness.script_command(folder, SCRIPT, every, faults, ranks=2, options=options)
    return harness.finish(harness.start(folder, command))


def test_a_replacement_that_waits_for_what_does_not_come_is_replaced(folder: Path) -> None:
    outcome = run(
        folder, "--case", "files", "--forgive", "2", faults=(kill(1, "backward", 3),), options=("--recover-timeout", "1.5")
    )
    assert outcome.code == 0, outcome.tail()
    line = r"^ftrun: the repair waits for rank 1, \d+ s so far; no progress for \d+ s, at .*stands_still.py:\d+.*; it is given up after"
    assert re.search(line, outcome.output, re.MULTILINE), outcome.tail()
    assert re.search(r"^ftrun: rank 1 hung .*held the repair up: no progress for", outcome.output, re.MULTILINE), outcome.tail()
    assert len(outcome.events("Stalled")) == 1 and outcome.actions("Publish")[-1]["replaced"] == [1]


@pytest.mark.slow
def test_the_second_time_the_run_ends(folder: Path) -> None:
    outcome = run(folder, "--case", "files", faults=(kill(1, "backward", 3),), options=("--recover-timeout", "1.5"))
    assert outcome.code == 70, outcome.tail()
    assert "another worker is no help: the run ends [ftrun explain F360]" in outcome.output, outcome.tail()
    assert "its repair stood still a second time" in outcome.output, outcome.tail()


@pytest.mark.parametrize("case", ["group", pytest.param("late-group", marks=pytest.mark.slow)])
def test_a_group_of_another_backend_is_refused_by_name(folder: Path, case: str) -> None:
    """A replacement would wait in it for ever."""
    outcome = run(folder, "--case", case)
    assert outcome.code == 2, outcome.tail()
    assert 'also made a process group of backend "gloo", of ranks 0-1' in outcome.output.replace("ranks 0, 1", "ranks 0-1")
    assert "make it by new_group() without a backend" in outcome.output and "[ftrun explain F361]" in outcome.output
