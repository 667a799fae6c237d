"""Trains a small model on the fake GPU and writes what came of it, for comparison between runs."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftrun

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.gpu.gpu_model import Gpu, QueuedSGD

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--wide", type=int, default=256, help="hidden features")
parser.add_argument("--pause", type=float, default=0.0, help="seconds in each body")
parser.add_argument("--wild", default="", help="RANK:STEP at which the first holder of the rank runs a wild kernel")
parser.add_argument("--writes", default="", help="RANK:STEP:SECONDS of a kernel that outlives its process")
parser.add_argument("--endless", default="", help="RANK:STEP at which a kernel begins that waits for a dead peer")
parser.add_argument("--still", action="store_true", help="the update region writes no buffer")
parser.add_argument("--device", type=int, help="that all ranks share; else each has one of its own")
parser.add_argument("--apart", action="store_true", help="each rank writes its own values into a buffer after the update")
args = parser.parse_args()

dist.init_process_group("ftrun")
rank = dist.get_rank()
gpu = Gpu(int(os.environ["LOCAL_RANK"]) if args.device is None else args.device)
torch.manual_seed(7)
model = torch.nn.Sequential(
    torch.nn.Linear(32, args.wide),
    torch.nn.BatchNorm1d(args.wide),
    torch.nn.ReLU(),
    torch.nn.Dropout(0.2),
    torch.nn.Linear(args.wide, 8),
)
gpu.take(model)
model.register_buffer("average", gpu.like(torch.zeros(8, args.wide)))
ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
gpu.order(ddp)
optimizer = QueuedSGD(ddp.parameters(), gpu)
torch.manual_seed(100 + rank)
job = ftrun.protect(model=ddp, optimizer=optimizer, ignore=["losses", "optimizer 0._in_flight"])
losses = []
for step in job.steps(args.steps):
    with step:
        time.sleep(args.pause)
        (args.out / f"at-{rank}").write_text(str(step.index))
        data = torch.Generator().manual_seed(1000 * step.index + rank)
        x, y = torch.randn(16, 32, generator=data), torch.randint(8, (16,), generator=data)
        loss = torch.nn.functional.cross_entropy(ddp(x), y)
        if args.writes.startswith(f"{rank}:{step.index}:") and not (args.out / "writes").exists():
            (args.out / "writes").touch()
            gpu.writes(model.average, float(args.writes.split(":")[2]))
        if args.endless == f"{rank}:{step.index}" and not (args.out / "endless").exists():
            (args.out / "endless").touch()
            gpu.endless()
        loss.backward()
        if args.wild == f"{rank}:{step.index}" and not (args.out / "wild").exists():
            (args.out / "wild").touch()
            gpu.fail()
        optimizer.step()
        optimizer.zero_grad()
        if not args.still:
            model.average.lerp_(torch.ones(8, args.wide) * loss.item() / dist.get_world_size(), 0.5 * args.apart)
        losses.append([step.index, loss.item()])
gpu.synchronize()


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


args.out.mkdir(parents=True, exist_ok=True)
state = [v for s in optimizer.state.values() for _, v in sorted(s.items())]
result = {
    "weights": digest(list(model.parameters())),
    "optimizer": digest(state),
    "buffers": digest(list(model.buffers())),
    "rng": digest([torch.get_rng_state()]),
    "loss": losses[-1],
    "pid": os.getpid(),
}
(args.out / f"rank-{rank}.json").write_text(json.dumps(result))
dist.destroy_process_group()
