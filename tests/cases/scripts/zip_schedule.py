"""A temperature for each step comes from a list, by `zip`, as in distillation and Gumbel-softmax."""

import torch
from both_ways import STEPS, begin, end, loss_of, protect, rows, small
from torch.nn.parallel import DistributedDataParallel as DDP

rank = begin()
model = DDP(small())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
temperatures = torch.linspace(3.0, 0.5, STEPS).tolist()
job = protect(model, optimizer)
torch.manual_seed(rank)
for step, temperature in zip(job.steps(STEPS), temperatures, strict=False):
    with step:
        x, y = rows()
        loss_of(model(x) / temperature, y).backward()
        optimizer.step()
        optimizer.zero_grad()
end(rank, model=model, optimizer=optimizer)
