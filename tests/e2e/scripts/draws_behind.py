"""Each rank draws a random number behind each body, which a replacement of a rank that died in its update does not."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftrun

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()
dist.init_process_group("ftrun")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
job = ftrun.protect(model, optimizer)
for step in job.steps(args.steps):
    with step:
        loss = model(torch.rand(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    noise = torch.rand(3)
dist.destroy_process_group()
