"""Trains to a checkpoint, saves it, loads it in a second run: SAVE or LOAD names the file, KILL kills rank 1 once."""

import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftrun

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
dist.init_process_group("ftrun")
ddp = DistributedDataParallel(model)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
job = ftrun.protect(model=ddp, optimizer=optimizer, scheduler=scheduler)
if os.environ.get("LOAD"):
    assert job.load(os.environ["LOAD"]) == 4
    assert job.start_step == 4, "also on the replacement, which goes on at 6"
last = 0
for step in job.steps(8, job.start_step):
    with step:
        if step.index == 6 and job.rank == 1 and os.environ.get("KILL") and step.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.arange(8.0).view(2, 4) * (step.index + 1) / 10 + job.rank
        (ddp(x) - 1).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if step.committed and step.index == 3 and job.rank == 0 and os.environ.get("SAVE"):
        job.save(os.environ["SAVE"], step=4)
    last = step.index
print("end", last, model.weight.tolist(), optimizer.param_groups[0]["lr"], flush=True)
