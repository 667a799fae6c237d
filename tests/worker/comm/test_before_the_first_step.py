"""What a script's groups did before its first step is given to a replacement as it was: point-to-point calls, and failures too."""

from __future__ import annotations

import re

import pytest

from tests.conftest import Ftrun

BEGIN = """
import hashlib, os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
import ftrun

def init(seconds=20):
    dist.init_process_group("ftrun", timeout=timedelta(seconds=seconds))
init()
rank, size = dist.get_rank(), dist.get_world_size()
"""
EXCHANGE = """
mine, theirs = torch.full((3,), float(rank + 1)), torch.zeros(3)
if rank == 0:
    dist.send(mine, 1)
    dist.recv(theirs, 1)
elif rank == 1:
    dist.recv(theirs, 0)
    dist.send(mine, 0)
seed = int(theirs.sum())
"""
FAILURE = """
dist.destroy_process_group()
init(2)
try:
    if rank == 0:
        dist.all_reduce(torch.ones(1))  # nobody else comes
    else:
        dist.barrier()
except RuntimeError as error:
    print("caught", rank, flush=True)
dist.destroy_process_group()
init()
seed = torch.tensor([float(rank)])
dist.all_reduce(seed)
seed = int(seed)
"""
TRAIN = """
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
job = ftrun.protect(model=ddp, optimizer=optimizer)
torch.manual_seed(seed + rank)
victim = int(sys.argv[1])
for step in job.steps(6):
    with step:
        ddp(torch.randn(8, 4)).square().mean().backward()
        if rank == victim and step.index == 3 and not os.path.exists("struck"):
            open("struck", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
state = b"".join(p.detach().numpy().tobytes() for p in model.parameters()) + torch.get_rng_state().numpy().tobytes()
print("end", rank, hashlib.sha256(state).hexdigest(), flush=True)
"""


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(EXCHANGE, id="point to point"),
        pytest.param(FAILURE, id="a failure that the script caught", marks=pytest.mark.slow),
    ],
)
def test_a_death_after_it_is_repaired(ftrun: Ftrun, before: str) -> None:
    script = ftrun.script(BEGIN + before + TRAIN)
    ends = []
    for victim in (-1, 0):
        run = ftrun.start(
            "--nproc-per-node", 4, "--spares", 1, "--run-id", f"victim{victim + 1}", script, victim, OMP_NUM_THREADS="1"
        )
        assert run.wait(90) == 0, run.stdout + run.stderr
        ends.append(sorted(re.findall(r"end (\d) (\w+)", run.stdout)))
    assert len(ends[0]) == 4 and ends[0] == ends[1]
    assert "takes over rank 0" in run.stderr and "start again" not in run.stderr, run.stderr
