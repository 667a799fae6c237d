"""Three real faults in one run, checked against an uninterrupted one, and read back with `ftrun timeline` alone."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.conftest import Reference, folder, stock

__all__ = ["folder", "stock"]  # fixtures

FAULTS = (
    harness.fault("kill", 1, "forward", 4),
    harness.fault("exception", 3, "backward", 8),
    harness.fault("abort", 2, "update", 12),
)
WHO = (
    ("rank 1, in the forward pass of step 4", "killed", "step 4 was done again"),
    ("rank 3, in the backward pass of step 8", "RuntimeError", "step 8 was done again"),
    ("rank 2, in the optimizer step of step 12", "SIGABRT", "training went on with step 13"),
)


def ftrun(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [harness.tool("ftrun"), *args]
    return subprocess.run(
        command, cwd=folder, env=harness.environment(folder), capture_output=True, text=True, timeout=60
    )


@pytest.mark.slow
def test_three_faults_are_told_by_the_timeline_alone(folder: Path, stock: Reference) -> None:
    outcome = harness.ftrun(folder, ("--steps", "16"), FAULTS, options=("--run-id", "told", "--max-replacements", "9"))
    outcome.need()
    harness.same(outcome, stock("--steps", "16"))
    assert "to see them: ftrun timeline told" in outcome.output
    for number, (who, why, cost) in enumerate(WHO, 1):
        done = ftrun(folder, "timeline", "told", "--incident", str(number))
        text = " ".join(done.stdout.split())
        assert done.returncode == 0, done.stderr
        assert f"what failed {who}" in text, done.stdout
        assert why in text and cost in text, done.stdout
        assert re.search(r"\d+ ms from the failure until every rank had done a new step", text)
        check_measured(json.loads(ftrun(folder, "timeline", "told", "--incident", str(number), "--json").stdout))


def check_measured(raw: dict[str, object]) -> None:
    """Every healthy rank's phases around the incident are there, in order, and end before the next one begins."""
    phases = raw["phases"]
    assert isinstance(phases, list)
    assert {p["rank"] for p in phases} == {0, 1, 2, 3}
    for kept in phases:
        for row in kept["steps"]:
            times = [t for t in row[3:] if t is not None]
            assert times == sorted(times), row
        begun = [row[3] for row in kept["steps"]]
        assert begun == sorted(begun)
