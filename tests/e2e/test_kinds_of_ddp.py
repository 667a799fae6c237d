"""What few scripts do with DistributedDataParallel ends bit for bit where torchrun ends, or is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import kill

SCRIPT = harness.SCRIPTS / "kinds_of_ddp.py"
KILLS = {
    "subgroups": [kill(1, "update", 5), kill(2, "backward", 7)],
    "in-turns": [kill(1, "forward", 3), kill(0, "update", 6), kill(2, "backward", 7)],
    "sparse": [kill(1, "backward", 2), kill(0, "update", 5), kill(2, "backward", 7)],
    "unfrozen": [kill(1, "backward", 2), kill(0, "forward", 5), kill(2, "backward", 7)],
    "compiled": [kill(1, "backward", 2), kill(0, "update", 5), kill(2, "backward", 7)],
    "compiled-inside": [kill(1, "backward", 2), kill(0, "update", 5), kill(2, "backward", 7)],
}


def command(folder: Path, case: str, faults: Sequence[str], *options: str) -> list[str]:
    arguments = ["--case", case, "--backend", "ftrun", "--out", str(folder / "out")]
    return harness.script_command(folder, SCRIPT, arguments, faults, options=["--max-replacements", "20", *options])


OFTEN = ("subgroups",)


@pytest.mark.parametrize("case", [c if c in OFTEN else pytest.param(c, marks=pytest.mark.slow) for c in KILLS])
def test_deaths_change_nothing(folder: Path, case: str) -> None:
    stock = [str(SCRIPT), "--case", case]
    stock += ["--backend", "gloo", "--out", str(folder / "stock" / "out")]
    wanted = harness.by_torch(folder / "stock", stock).need()
    outcome = harness.finish(harness.start(folder / "ours", command(folder / "ours", case, KILLS[case])))
    assert outcome.need() == wanted, outcome.tail()
    assert len(harness.deaths(outcome)) == len(KILLS[case]), outcome.tail()
    assert "bit-identical to an uninterrupted run: yes" in outcome.output
    assert not outcome.events("Raised"), outcome.tail()


def test_a_rank_without_a_replica_takes_a_lower_rung(folder: Path) -> None:
    """Both ranks of a pair die in the update: the other pair's weights are whole, and are not theirs."""
    faults = [kill(0, "update", 5), kill(1, "update", 5)]
    outcome = harness.finish(harness.start(folder, command(folder, "subgroups", faults, "--snapshot-every", "2")))
    assert outcome.code == 0, outcome.tail()
    assert "host snapshot" in outcome.output, outcome.tail()


@pytest.mark.slow
def test_everyone_goes_back_while_a_rank_is_between_two_bodies(folder: Path) -> None:
    """It must not begin the step that it was handed out: the others do an earlier one."""
    stock = [str(SCRIPT), "--case", "subgroups"]
    wanted = harness.by_torch(folder / "stock", [*stock, "--backend", "gloo", "--out", str(folder / "stock" / "out")])
    line = command(folder / "ours", "subgroups", [], "--snapshot-every", "2")
    outcome = harness.finish(harness.start(folder / "ours", [*line, "--linger", "6"]))
    assert "host snapshot" in outcome.output, outcome.tail()
    assert outcome.need() == wanted.need(), outcome.tail()


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("hook", "DDP communication hooks keep state that ftrun cannot rewind"),
        ("stock-group", 'this script also made a process group of backend "gloo", of ranks 0-3'),
    ],
)
def test_what_cannot_be_recovered_is_refused(folder: Path, case: str, why: str) -> None:
    """A hook that is registered after protect(), a group that is not ours."""
    outcome = harness.finish(harness.start(folder, command(folder, case, [])))
    assert outcome.code == 2, outcome.tail()
    assert why in outcome.output
