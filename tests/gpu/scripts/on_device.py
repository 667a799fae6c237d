"""Trains on a real GPU, shared by all ranks (over Gloo) or one each (NCCL), or on the CPU; writes hashes for comparison."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftrun

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--pause", type=float, default=0.0, help="seconds in each body")
parser.add_argument("--device", default="cuda:0", help="cuda:0, cpu, or `own`: that of the local rank")
args = parser.parse_args()

torch.use_deterministic_algorithms(True)
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if args.device == "own" else args.device)
on_gpu = device.type == "cuda"
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("ftrun")
rank = dist.get_rank()
torch.manual_seed(7)
model = torch.nn.Sequential(
    torch.nn.Linear(32, 512), torch.nn.BatchNorm1d(512), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(512, 8)
).to(device)
ddp = DistributedDataParallel(model, device_ids=[device] if on_gpu else None, bucket_cap_mb=0.02)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)
job = ftrun.protect(model=ddp, optimizer=optimizer)
for step in job.steps(args.steps):
    with step:
        time.sleep(args.pause)
        (args.out / f"at-{rank}").write_text(str(step.index))
        data = torch.Generator().manual_seed(1000 * step.index + rank)
        x, y = torch.randn(16, 32, generator=data).to(device), torch.randint(8, (16,), generator=data).to(device)
        loss = torch.nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
if on_gpu:
    torch.cuda.synchronize()


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)).hexdigest()


args.out.mkdir(parents=True, exist_ok=True)
result = {
    "weights": digest(list(model.parameters())),
    "optimizer": digest([v for s in optimizer.state.values() for _, v in sorted(s.items())]),
    "buffers": digest(list(model.buffers())),
    "rng": digest([torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if on_gpu else [])]),
    "loss": loss.item(),
    "pinned": torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if on_gpu else 0,
}
(args.out / f"rank-{rank}.json").write_text(json.dumps(result))
dist.destroy_process_group()
