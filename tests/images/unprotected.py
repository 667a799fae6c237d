"""Takes its time to load, then trains without ftrun.protect(): for pictures of a run that starts, and of one that is not protected."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

time.sleep(20)  # as a script that reads its data
dist.init_process_group("ftrun")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
