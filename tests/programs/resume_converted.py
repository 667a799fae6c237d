"""A loop over steps that writes a checkpoint every ten steps, and goes on from the one that it finds."""

import os

import torch
import torch.distributed as dist
from common import batch, finish, load, net, reach, save
from torch.nn.parallel import DistributedDataParallel as DDP

import ftrun

dist.init_process_group("ftrun")
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
saved, first = load(), 0
if saved:
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
torch.manual_seed(first)
job = ftrun.protect(model, optimizer)
for body in job.steps(int(os.environ["STEPS"]), start=first):
    step = body.index
    if step % 10 == 0 and dist.get_rank() == 0:
        reach(f"before-{step}")
        save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
        reach(f"saved-{step}")
    with body:
        x, y = batch(step)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        reach(f"step-{step}")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
finish(model, optimizer)
