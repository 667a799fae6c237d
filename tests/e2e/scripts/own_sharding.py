"""Gradients go through a reduce_scatter and an all_gather of the script's own in the body, under `protect`.

own_sharding.py --backend ftrun|gloo --out FOLDER
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

import ftrun

parser = argparse.ArgumentParser()
parser.add_argument("--backend", required=True)
parser.add_argument("--out", required=True, type=Path)
arguments = parser.parse_args()

dist.init_process_group(arguments.backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
ddp = torch.nn.parallel.DistributedDataParallel(model)
job = ftrun.protect(model=ddp, optimizer=optimizer)
torch.manual_seed(rank)
for step in job.steps(10):
    with step:
        ddp(torch.randn(6, 64)).square().mean().backward()
        scale = 1.0 + dist.get_rank()  # so that what is averaged is not equal
        flat = scale * torch.cat([p.grad.view(-1) for p in model.parameters()])
        part = torch.empty(flat.numel() // size)
        work = dist.reduce_scatter_tensor(part, flat, op=dist.ReduceOp.AVG, async_op=True)
        work.wait()
        dist.all_gather_into_tensor(flat, part)
        for parameter, grad in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad.copy_(grad.view_as(parameter))
        optimizer.step()
        optimizer.zero_grad()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
arguments.out.mkdir(parents=True, exist_ok=True)
target = arguments.out / f"rank-{rank}.json"
target.with_suffix(".tmp").write_text(json.dumps({"weights": digest}))
os.replace(target.with_suffix(".tmp"), target)
dist.destroy_process_group()
