"""Adam at first, SGD later: one name is bound to the other optimizer at a certain step."""

import torch
from both_ways import STEPS, begin, end, loss_of, protect, rows, small
from torch.nn.parallel import DistributedDataParallel as DDP

rank = begin()
model = DDP(small())
fast = torch.optim.Adam(model.parameters(), lr=0.01)
slow = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.8)
chosen = fast
job = protect(model, [fast, slow])
torch.manual_seed(rank)
for step in job.steps(STEPS):
    if step.index == 5:
        chosen = slow
    with step:
        x, y = rows()
        loss_of(model(x), y).backward()
        chosen.step()
        chosen.zero_grad()
end(rank, model=model, fast=fast, slow=slow)
