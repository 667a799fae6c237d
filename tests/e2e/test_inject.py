"""`ftrun inject-fault` and `ftrun drain` on a live run: what they do, what they say, what they refuse; and equal results."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import harness
from tests.e2e.conftest import Reference
from tests.e2e.test_services import SLOW, Live

Command = Callable[..., subprocess.CompletedProcess[str]]


class Struck(Live):
    """A live run, and commands that act on it."""

    def call(self, *words: str, seconds: float = 40.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [harness.tool("ftrun"), *words],
            env=harness.environment(self.folder),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=self.folder,
        )

    def inject(self, *words: str) -> dict[str, Any]:
        done = self.call("inject-fault", *words, "--json")
        assert done.returncode == 0, done.stderr + self.running.output
        facts = json.loads(done.stdout)
        assert facts["fired"] is True
        return dict(facts)


@pytest.fixture
def live(folder: Path) -> Iterator[Callable[..., Struck]]:
    """live(options...): a slow run of the reference script; ended after the test if it still goes on."""
    started: list[Struck] = []

    def begin(*options: str, steps: int = 12, spares: int = 1) -> Struck:
        arguments = [*SLOW, "--steps", str(steps)]
        command = harness.ftrun_command(
            folder, arguments, spares=spares, options=["--max-replacements", "20", *options]
        )
        started.append(Struck(folder, command))
        return started[-1]

    yield begin
    for run in started:
        if run.running.process.poll() is None:
            run.running.process.send_signal(signal.SIGKILL)
            run.running.process.wait()


def fired(outcome: harness.Outcome) -> list[tuple[str, int, str]]:
    notes = [note["fired"] for note in outcome.notes("fault")]
    assert all(note["source"] == "request" for note in notes)
    return [(note["kind"], note["rank"], note["phase"]) for note in notes]


def test_kinds_on_a_live_run(stock: Reference, live: Callable[..., Struck]) -> None:
    """One run, several faults: from outside, at a phase, at a step, and one that ends by itself."""
    run = live(steps=24)
    run.reach(1)
    struck = run.inject("kill", "--rank", "2")
    assert struck["rank"] == 2 and struck["pid"] > 0
    run.said("recovered in")
    assert run.inject("exception", "--rank", "0")["phase"] in ("forward", "backward")
    at = run.inject("kill", "--rank", "1", "--at", "update", "--step", "12")
    assert (at["phase"], at["step"]) == ("update", 12)
    assert run.inject("slow:3", "--rank", "3", "--at", "forward", "--for", "0.2")["phase"] == "forward"
    assert run.inject("freeze", "--for", "0.2")["rank"] == 3
    outcome = run.finish()
    harness.same(stock(*SLOW, "--steps", "24"), outcome)
    assert [(k, r) for k, r, _ in fired(outcome)] == [
        ("kill", 2), ("exception", 0), ("kill", 1), ("slow", 3), ("freeze", 3),
    ]  # fmt: skip
    assert harness.replaced_ranks(outcome) == {1, 2}, "a short freeze is no failure"
    assert "injected fault: kill strikes rank 1 in update of step 12" in outcome.output
