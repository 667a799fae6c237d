"""The loss is added up, and updates are counted, behind optimizer.step()."""

import torch
from both_ways import STEPS, begin, end, loss_of, protect, rows, small
from torch.nn.parallel import DistributedDataParallel as DDP

rank = begin()
model = DDP(small())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
total, done = 0.0, 0
job = protect(model, optimizer)
torch.manual_seed(rank)
for step in job.steps(STEPS):
    with step:
        x, y = rows()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
        done += 1
end(rank, model=model, done=done)
