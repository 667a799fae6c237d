"""Gradients of three batches are added up, and the number that `enumerate` counts says when to update."""

from contextlib import nullcontext

import torch
from both_ways import STEPS, begin, end, loss_of, protect, rows, small
from torch.nn.parallel import DistributedDataParallel as DDP

rank = begin()
model = DDP(small())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
job = protect(model, optimizer)
torch.manual_seed(rank)
for number, step in enumerate(job.steps(STEPS), start=1):
    with step:
        x, y = rows()
        with nullcontext() if number % 3 == 0 else model.no_sync():
            (loss_of(model(x), y) / 3).backward()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
end(rank, model=model, optimizer=optimizer)
