"""FSDP2 without `protect` trains on backend "ftrun" as it does under torchrun with Gloo, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import harness

SCRIPT = harness.SCRIPTS / "fsdp2.py"


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_fsdp2_ends_where_torchrun_ends(ranks: int, folder: Path) -> None:
    stock = [harness.tool("torchrun"), "--standalone", "--nproc-per-node", str(ranks), str(SCRIPT)]
    stock += ["--backend", "gloo", "--out", str(folder / "stock" / "out")]
    wanted = harness.finish(harness.start(folder / "stock", stock), ranks).ranks
    assert None not in wanted  # with all ranks' results: torch's Gloo may abort at exit
    ours = ["--backend", "ftrun", "--out", str(folder / "ours" / "out")]
    command = harness.script_command(folder / "ours", SCRIPT, ours, ranks=ranks, spares=0)
    outcome = harness.finish(harness.start(folder / "ours", command), ranks)
    assert outcome.need() == wanted, outcome.tail()
    assert len({answer["weights"] for answer in outcome.need()}) == 1
    assert not harness.deaths(outcome)
