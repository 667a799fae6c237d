"""tqdm around the loop."""

import torch
from both_ways import STEPS, begin, end, loss_of, protect, rows, small
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

rank = begin()
model = DDP(small())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
job = protect(model, optimizer)
torch.manual_seed(rank)
for step in tqdm(job.steps(STEPS), total=STEPS, disable=rank != 0, mininterval=0):
    with step:
        x, y = rows()
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
end(rank, model=model, optimizer=optimizer)
