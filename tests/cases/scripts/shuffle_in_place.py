"""One list of indices is shuffled in place before each epoch: an epoch's order follows from all shuffles before."""

import random

import torch
from both_ways import WIDTH, begin, end, loss_of, protect, small, strike
from torch.nn.parallel import DistributedDataParallel as DDP

rank = begin()
x = torch.randn(80, WIDTH)
indices = [*range(80)]
random.seed(11)
model = DDP(small())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
job = protect(model, optimizer)
torch.manual_seed(rank)
for epoch in job.epochs(5):
    random.shuffle(indices)
    parts = x[indices[rank::2]].split(8)
    for step, part in job.batches(parts):
        with step:
            strike(rank, epoch, step.index)
            loss_of(model(part), part.mean(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
end(rank, model=model, optimizer=optimizer)
