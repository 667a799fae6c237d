"""A rank that cannot prove that its collectives of a stopped world are over does not use their tensors again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import injected
from tests.e2e import harness
from tests.e2e.harness import kill

SCRIPT = harness.SCRIPTS / "never_ends.py"


def weights(outcome: harness.Outcome) -> list[str]:
    assert outcome.code == 0, outcome.tail()
    return re.findall(r"weights (\w{64})", outcome.output)


@pytest.mark.slow
def test_it_ends_itself_and_is_replaced(folder: Path) -> None:
    """Nobody shuts its connections down, so that rank 2 waits for rank 3, which has left the step."""
    clean = harness.finish(harness.start(folder / "clean", harness.script_command(folder / "clean", SCRIPT, [], [])))
    ours, options = folder / "ours", ["--stop-timeout", "2"]
    command = harness.script_command(ours, SCRIPT, [], [kill(1, "backward", 2)], options=options)
    outcome = harness.finish(harness.start(ours, command, env=injected.env(without="abort")))
    assert set(weights(outcome)) == set(weights(clean)) and len(weights(outcome)) == 4
    line = next(line for line in outcome.output.splitlines() if "rank 2 gave way to a replacement" in line)
    assert "(a collective of the world that was stopped did not end within 1 s" in line
    assert {1, 2} <= harness.replaced_ranks(outcome)
