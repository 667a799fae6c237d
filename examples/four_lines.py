"""The smallest script that survives the loss of a worker: ftrun --nproc-per-node 2 --spares 1 examples/four_lines.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftrun

torch.manual_seed(0)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

dist.init_process_group("ftrun")
torch.manual_seed(dist.get_rank())
ddp = DistributedDataParallel(model)
job = ftrun.protect(model=ddp, optimizer=optimizer)
for step in job.steps(5000):
    with step:
        x = torch.randn(32, 16)
        loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
if job.rank == 0:
    error = (model.weight - 1).abs().max().item()
    print(f"every weight is 1, give or take {error:.1e}")
