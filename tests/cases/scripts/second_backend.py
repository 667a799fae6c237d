"""A gloo group beside the first one, for metrics and objects, used in every step."""

import torch
import torch.distributed as dist
from both_ways import STEPS, begin, end, loss_of, protect, rows, small
from torch.nn.parallel import DistributedDataParallel as DDP

rank = begin()
metrics = dist.new_group(backend="gloo")
model = DDP(small())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
job = protect(model, optimizer)
torch.manual_seed(rank)
for step in job.steps(STEPS):
    with step:
        x, y = rows()
        loss = loss_of(model(x), y)
        every = [None] * 2
        dist.all_gather_object(every, {"loss": loss.item()}, group=metrics)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
end(rank, model=model, optimizer=optimizer)
