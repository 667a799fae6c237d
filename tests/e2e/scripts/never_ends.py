"""Ranks 2 and 3 add in a group of their own, rank 3 late: when rank 1 dies in backward, rank 2's part has begun and cannot end.

Prints the digest of the weights at the end.
"""

from __future__ import annotations

import hashlib
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftrun

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("ftrun")
rank = dist.get_rank()
pair = dist.new_group([2, 3])
model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))), bucket_cap_mb=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
job = ftrun.protect(model=model, optimizer=optimizer)
for step in job.steps(5):
    x = torch.full((8, 64), 0.01 * (rank + 1) + step.index)
    with step:
        shared, work = x.sum().view(1), None
        if rank == 2:
            work = dist.all_reduce(shared, group=pair, async_op=True)
        if rank == 1:
            time.sleep(0.2)
        model(x).square().mean().backward()
        if rank == 3:
            work = dist.all_reduce(shared, group=pair, async_op=True)
        if work is not None:
            work.wait()
        optimizer.step()
        optimizer.zero_grad()
raw = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(raw).hexdigest(), flush=True)
dist.destroy_process_group()
