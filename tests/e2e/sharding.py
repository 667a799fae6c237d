"""Runs of scripts/sharded.py: under stock torch, under ftrun with faults, and where each replacement's state came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.e2e import harness
from tests.e2e.harness import Outcome

SCRIPT = harness.SCRIPTS / "sharded.py"
SLOW = 4 * harness.TIMEOUT
HSDP = ("--layout", "hsdp")  # of four ranks 0 and 2 hold the same shard, and 1 and 3
Stock = Callable[..., Outcome]


def stock(folder: Path, arguments: Sequence[str], ranks: int) -> Outcome:
    """The script on stock torch and Gloo."""
    command = [str(SCRIPT), "--backend", "gloo"]
    paths = f"{harness.ROOT}:{harness.SCRIPTS}"
    command += ["--out", str(folder / "out"), *arguments]
    return harness.by_torch(folder, command, ranks, env={"PYTHONPATH": paths}, timeout=SLOW, workers=ranks)


def faulted(
    folder: Path,
    arguments: Sequence[str],
    faults: Sequence[str] = (),
    options: Sequence[str] = (),
    ranks: int = harness.RANKS,
    **env: str,
) -> Outcome:
    """The script under ftrun."""
    arguments = ["--out", str(folder / "out"), *arguments]
    options = ("--max-replacements", "99", *options)
    command = harness.script_command(folder, SCRIPT, arguments, faults, ranks=ranks, spares=1, options=options)
    return harness.finish(harness.start(folder, command, env), ranks, timeout=SLOW)


def sources(outcome: Outcome) -> list[str]:
    """Where each replacement's state came from, as the lines of the incidents say it."""
    return [line.partition("; state ")[2] for line in outcome.output.splitlines() if " takes over rank " in line]


def exact(outcome: Outcome, wanted: Outcome) -> None:
    """It ended where stock torch ended, says so, and ranks that were not replaced kept their process."""
    harness.same(wanted, outcome)
    assert "bit-identical to an uninterrupted run: yes" in outcome.output, outcome.tail()
    harness.check_survivors(outcome)
