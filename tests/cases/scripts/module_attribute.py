"""Dropout's rate and BatchNorm's momentum are plain attributes, and are changed at a certain step."""

import torch
from both_ways import STEPS, begin, end, loss_of, protect, rows, small
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank = begin()
drop, norm = nn.Dropout(0.0), nn.BatchNorm1d(10)
model = DDP(small(norm, drop))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
job = protect(model, optimizer)
torch.manual_seed(rank)
for step in job.steps(STEPS):
    if step.index == 5:
        drop.p, norm.momentum = 0.4, 0.05
    with step:
        x, y = rows()
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
end(rank, model=model, optimizer=optimizer)
