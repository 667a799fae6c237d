"""reduce_scatter, whose Work has no future on Gloo, is stopped and done again like every other collective."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import kill

SCRIPT = harness.SCRIPTS / "own_sharding.py"
KILLS = [kill(1, "forward", 2), kill(2, "backward", 4), kill(0, "backward", 6), kill(3, "update", 8)]


@pytest.mark.slow
def test_deaths_around_a_reduce_scatter_change_nothing(folder: Path) -> None:
    stock = [harness.tool("torchrun"), "--standalone", "--nproc-per-node", "4", str(SCRIPT)]
    stock += ["--backend", "gloo", "--out", str(folder / "stock" / "out")]
    wanted = harness.finish(harness.start(folder / "stock", stock)).ranks
    assert None not in wanted
    ours = ["--backend", "ftrun", "--out", str(folder / "ours" / "out")]
    options = ["--max-replacements", "20"]
    command = harness.script_command(folder / "ours", SCRIPT, ours, KILLS, options=options)
    outcome = harness.finish(harness.start(folder / "ours", command))
    assert outcome.need() == wanted, outcome.tail()
    assert len(harness.deaths(outcome)) == len(KILLS), outcome.tail()
    assert not outcome.events("Raised"), outcome.tail()
