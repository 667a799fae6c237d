"""What the update of a loop's last step changes is in a replacement too, although the others are at the loop's end meanwhile."""

from __future__ import annotations

from pathlib import Path

from tests.e2e import harness

SCRIPT = harness.SCRIPTS / "last_update.py"


def test_a_death_in_the_last_update(folder: Path) -> None:
    stock, ours = folder / "stock", folder / "ours"
    line = [str(SCRIPT), "--backend", "gloo", "--out", str(stock)]
    assert harness.by_torch(stock, line).code == 0
    command = harness.script_command(ours, SCRIPT, ["--backend", "ftrun", "--out", str(ours), "--dies"])
    outcome = harness.finish(harness.start(ours, command))
    assert outcome.code == 0 and "rank 2 died in update of step 5 (SIGKILL" in outcome.output, outcome.tail()
    ends = [[(out / f"rank-{rank}.txt").read_text() for rank in range(4)] for out in (stock, ours)]
    assert ends[0] == ends[1]
    assert "bit-identical to an uninterrupted run: yes" in outcome.output, outcome.tail()
