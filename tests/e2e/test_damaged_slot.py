"""A slot whose bytes were overwritten is no source: the next rung is taken, and the end is that of an uninterrupted run."""

from __future__ import annotations

import re

from tests.conftest import Ftrun

TRAIN = """
import hashlib, os, signal, sys
import torch, torch.distributed as dist
import ftrun
from ftrun.worker.repair.recovery_points import START
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
dist.init_process_group("ftrun")
rank = dist.get_rank()
ddp = torch.nn.parallel.DistributedDataParallel(model)
job = ftrun.protect(model=ddp, optimizer=optimizer)
torch.manual_seed(rank)
for step in job.steps(8):
    with step:
        ddp(torch.randn(8, 4)).square().mean().backward()
        if sys.argv[1] == "damage" and rank == 1 and step.index == 5 and not os.path.exists("struck"):
            open("struck", "w").close()
            data = job._loop.kit.ledger.slots.data(START)
            data[len(data) // 2] ^= 255
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
state = b"".join(p.detach().numpy().tobytes() for p in model.parameters()) + torch.get_rng_state().numpy().tobytes()
print("end", rank, hashlib.sha256(state).hexdigest(), flush=True)
"""


def test_everyone_goes_back_to_the_host_snapshot(ftrun: Ftrun) -> None:
    script = ftrun.script(TRAIN)
    ends = []
    for how in ("clean", "damage"):
        run = ftrun.start(
            "--nproc-per-node", 4, "--run-id", how, "--snapshot-every", 2, script, how, OMP_NUM_THREADS="1"
        )
        assert run.wait(90) == 0, run.stdout + run.stderr
        ends.append(sorted(re.findall(r"end (\d) (\w+)", run.stdout)))
    assert len(ends[0]) == 4 and ends[0] == ends[1], run.stderr
    assert "does not match its checksum" in run.stderr and "host snapshot" in run.stderr, run.stderr
