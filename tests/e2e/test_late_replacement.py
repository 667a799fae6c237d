"""A replacement may take as long as `--recover-timeout` allows, however short the collectives' own timeout is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import kill

SCRIPT = harness.SCRIPTS / "late_replacement.py"


def digests(out: Path) -> list[str]:
    return [(out / f"rank-{rank}.txt").read_text() for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "groups", "spares"), [("start", 1, 0), ("loop", 0, 1), ("loop", 1, 1)])
def test_the_others_are_patient(folder: Path, where: str, groups: int, spares: int) -> None:
    same = ["--where", where, "--groups", str(groups), "--out"]
    stock = [str(SCRIPT), "--backend", "gloo"]
    assert harness.by_torch(folder / "stock", [*stock, *same, str(folder / "stock")]).code == 0
    arguments = ["--backend", "ftrun", *same, str(folder / "out")]
    ours = harness.script_command(folder / "ours", SCRIPT, arguments, [kill(1, "backward", 5)], spares=spares)
    outcome = harness.finish(harness.start(folder / "ours", ours))
    assert outcome.code == 0, outcome.tail()
    assert digests(folder / "out") == digests(folder / "stock")
    assert len(harness.deaths(outcome)) == 1, outcome.tail()
    assert not outcome.events("Unconnected"), outcome.tail()
