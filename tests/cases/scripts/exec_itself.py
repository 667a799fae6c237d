"""A script that needs a variable before Python starts, sets it, and starts itself again in its own place."""

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "7":
    os.environ["PYTHONHASHSEED"] = "7"
    os.execv(sys.executable, [sys.executable, *sys.argv])

import time

import torch
import torch.distributed as dist
from leave import leave

dist.init_process_group("gloo")
total = torch.zeros(1)
for _ in range(100):
    mine = torch.ones(1)
    dist.all_reduce(mine)
    total += mine
    time.sleep(0.05)
leave(dist.get_rank(), total=total.item(), text=hash("text"))
dist.destroy_process_group()
