"""Every rank waits for the others and nobody is to blame: connections are made again once, then the run ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import harness

# in step 3 each rank waits for a message that nobody sends, as behind a link that lost it
SCRIPT = """
import os
import torch
import torch.distributed as dist
import ftrun
from torch import nn

torch.manual_seed(1)
dist.init_process_group("ftrun")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(model=model, optimizer=optimizer)
for step in job.steps(6):
    with step:
        if step.index == 3 and step.attempt < {attempts}:
            dist.recv(torch.zeros(1), src=(job.rank + 1) % job.world_size)
        model(torch.full((4, 8), float(step.index + job.rank))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if job.rank == 0:
    print("pid", os.getpid(), "sum", sum(p.double().sum().item() for p in model.parameters()))
"""


def run(folder: Path, attempts: int) -> harness.Outcome:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT.format(attempts=attempts))
    command = [harness.tool("ftrun"), "--nproc-per-node", "3", "--spares", "0", "--hang-timeout", "1", "train.py"]
    return harness.finish(harness.start(folder, command), 3, 60)


@pytest.mark.slow
def test_connections_are_made_again_when_everybody_waits(folder: Path) -> None:
    outcome = run(folder / "s", 1)
    assert outcome.code == 0, outcome.tail()
    assert len(outcome.events("Stuck")) == 1
    event = outcome.events("Stuck")[0]
    assert event["fault"] == "link" and "rank 2 in recv #" in event["evidence"]
    assert outcome.notes("incident")[0]["fault"] == "link"
    assert "every rank waits for the others in recv" in outcome.output
    assert [a["replaced"] for a in outcome.actions("Publish")] == [[], []], "nobody is replaced"
    clean = run(folder / "c", 0)
    assert clean.events("Stuck") == []
    assert result(outcome) == result(clean)


def result(outcome: harness.Outcome) -> str:
    return next(line for line in outcome.output.splitlines() if " sum " in line).partition(" sum ")[2]


@pytest.mark.slow
def test_waiting_again_after_that_ends_the_run(folder: Path) -> None:
    outcome = run(folder / "s", 99)
    assert outcome.code == 1
    assert len(outcome.events("Stuck")) == 2
    assert "also after all connections were made again; the run ends" in outcome.output
