"""A plain loop over steps, with a schedule and clipped gradients."""

import torch
import torch.distributed as dist
from common import batch, finish, net, reach
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
for step in range(30):
    x, y = batch(step)
    loss = torch.nn.functional.cross_entropy(model(x), y)
    reach(f"step-{step}")
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
finish(model, optimizer)
