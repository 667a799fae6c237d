"""job.log: each committed step once, with the mean over all ranks, whoever dies where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e import harness

SCRIPT = harness.SCRIPTS / "logged.py"


def test_each_committed_step_is_logged_once(folder: Path) -> None:
    plain = [str(SCRIPT), "plain.json"]
    outcome = harness.by_torch(folder / "stock", plain)
    assert outcome.code == 0, outcome.tail()
    wanted = json.loads((folder / "stock" / "plain.json").read_text())
    faults = [harness.kill(0, "update", 1), harness.kill(2, "backward", 3), harness.kill(0, "update", 4)]
    command = harness.script_command(folder / "ours", SCRIPT, ["plain.json"], faults, options=("--max-replacements", "9"))
    outcome = harness.finish(harness.start(folder / "ours", command), 0)
    assert outcome.code == 0, outcome.tail()
    assert outcome.output.count("(SIGKILL") == 3, outcome.tail()
    assert json.loads((folder / "ours" / "plain.json").read_text()) == wanted
    assert _lines(folder / "ours") == [
        {"epoch": number // 5, "step": number % 5, "loss": loss, "rank": rank} for number, (loss, rank) in enumerate(wanted)
    ]


def _lines(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("ftrun-logs/*/attempt_0/metrics.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    gates = [line.pop("gate") for line in found]
    assert gates == sorted(set(gates))
    return found
