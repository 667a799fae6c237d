"""FSDP2 without `protect`: a small model, sharded layer by layer, and the bits of its weights at the end."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ftrun  # noqa: F401  registers the backend

parser = argparse.ArgumentParser()
parser.add_argument("--backend", required=True)
parser.add_argument("--out", required=True, type=Path)
arguments = parser.parse_args()

dist.init_process_group(arguments.backend)
torch.manual_seed(5)
model = torch.nn.Sequential(*[torch.nn.Linear(17, 17) for _ in range(4)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(100 + dist.get_rank())
losses = []
for _ in range(6):
    loss = model(torch.randn(8, 17)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss).hex())
weights = hashlib.sha256()
for parameter in model.parameters():
    weights.update(parameter.full_tensor().detach().numpy().tobytes())
arguments.out.mkdir(parents=True, exist_ok=True)
answer = {"weights": weights.hexdigest(), "losses": losses}
(arguments.out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(answer))
dist.barrier()
dist.destroy_process_group()
