"""Small protected scripts for `ftrun verify`, each with a way to be unlike itself: --flaw says which."""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftrun

parser = argparse.ArgumentParser()
parser.add_argument(
    "--flaw", default="", choices=["", "chance", "outside", "checkpoint", "exit", "unprotected", "wait"]
)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--steps", type=int, default=8)
args = parser.parse_args()

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
dist.init_process_group("ftrun")
ddp = DistributedDataParallel(model)
if args.flaw == "unprotected":
    raise SystemExit(0)
job = ftrun.protect(model=ddp, optimizer=optimizer)
checkpoint = args.out / "checkpoint"
if args.flaw == "checkpoint" and checkpoint.exists():
    job.load(checkpoint)
counter = itertools.count()  # what ftrun knows nothing of: a step done again finds it further on
if args.flaw == "wait" and dist.get_rank() == 0:
    Path("waiting").touch()
for step in job.steps(10**9 if args.flaw == "wait" else args.steps):
    with step:
        x = torch.randn(4, 6) + (next(counter) if args.flaw == "outside" else 0)
        loss = ddp(x).square().mean()
        if args.flaw == "chance" and step.index == 3:
            loss = loss * (1 + int.from_bytes(os.urandom(1), "little"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
dist.barrier()
if args.flaw == "checkpoint" and dist.get_rank() == 0:
    args.out.mkdir(exist_ok=True)
    job.save(checkpoint, args.steps - 2)
if args.flaw == "exit":
    os._exit(0)
