"""Process groups of some ranks: who of them holds the world up, and that a replacement meets its peers in all groups at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import Outcome, fault, kill

# ranks 1 to 3 have a group of their own; with "skip" rank 2 leaves one of its all-reduces out, at the first try
SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
import ftrun
from torch import nn

torch.manual_seed(1)
dist.init_process_group("ftrun")
some = dist.new_group([1, 2, 3])
time.sleep(float(sys.argv[2]))
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(model=model, optimizer=optimizer)
for step in job.steps(12):
    with step:
        time.sleep(0.02)
        weight = torch.full((1,), 1.0 + step.index + job.rank)
        skips = sys.argv[1] == "skip" and (job.rank, step.index, step.attempt) == (2, 8, 0)
        if job.rank > 0 and not skips:
            dist.all_reduce(weight, group=some)
        (weight * model(torch.full((4, 8), 0.1 * (step.index + job.rank)))).square().mean().sqrt().backward()
        optimizer.step()
        optimizer.zero_grad()
if job.rank == 0:
    print("sum", sum(p.double().sum().item() for p in model.parameters()))
dist.destroy_process_group()
"""


def run(folder: Path, how: str, faults: list[str], seconds: float = 0.0) -> Outcome:
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = harness.script_command(folder, script, [how, str(seconds)], faults, options=("--hang-floor", "1.4"))
    return harness.finish(harness.start(folder, command))


def result(outcome: Outcome) -> str:
    assert outcome.code == 0, outcome.tail()
    return next(line for line in outcome.output.splitlines() if " sum " in line).partition(" sum ")[2]


def accused(outcome: Outcome) -> list[tuple[str, int]]:
    """(fault, worker) of what was detected."""
    return [(e["fault"], e["worker"]) for e in outcome.events("Died") if e["fault"] in ("collective", "hang", "link")]


@pytest.mark.slow
def test_a_rank_that_leaves_out_a_collective_of_a_subgroup_is_replaced(folder: Path) -> None:
    """Ranks 1 and 3 wait for it in their group, rank 0 in another one for them."""
    outcome = run(folder / "skip", "skip", [])
    assert accused(outcome) == [("collective", 2)], outcome.tail()
    assert "ranks 1, 3 have waited in allreduce #1 among ranks 1-3 of step 8" in outcome.output, outcome.tail()
    assert not outcome.events("Stuck"), outcome.tail()
    assert result(outcome) == result(run(folder / "clean", "all", []))


@pytest.mark.slow
def test_survivors_do_not_wait_for_a_slow_start_of_the_replacement(folder: Path) -> None:
    """It meets them in both groups before its script goes on: reset is over long before restore."""
    seconds = 4.0
    outcome = run(folder, "all", [kill(2, "backward", 6)], seconds)
    assert result(outcome)
    found = re.search(r"reset ([\d.]+), restore ([\d.]+)", outcome.output)
    assert found and float(found[1]) < 1000 * seconds / 2 < float(found[2]), outcome.tail()


def test_a_rank_that_hangs_is_the_only_one_that_is_blamed_in_a_pipeline(folder: Path) -> None:
    """The others wait for one another in sends, receives, collectives and at the gate."""
    script = harness.SCRIPTS / "pipelined.py"
    arguments = ["--backend", "ftrun", "--out", str(folder / "out"), "--schedule", "1f1b", "--steps", "12"]
    options = ("--hang-floor", "1.4", "--max-replacements", "9")
    command = harness.script_command(folder, script, arguments, [fault("hang", 2, "backward", 8)], options=options)
    outcome = harness.finish(harness.start(folder, command))
    outcome.need()
    assert accused(outcome) == [("hang", 2)], outcome.tail()
    assert "bit-identical to an uninterrupted run: yes" in outcome.output
