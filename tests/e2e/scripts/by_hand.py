"""Parallelism that is written by hand: nothing in it says which ranks hold the same, and all ranks have equal shapes.

by_hand.py --backend ftrun|gloo --out FOLDER --kind tensor|experts [--declared dp|tp|world] [--part 6] [--one] [--steps 12]

Four ranks: two times two. `tensor`: two layers whose weights are cut over "tp", with an all-reduce in the forward and one in the
backward; gradients are averaged over "dp". `experts`: each rank's own layer; until step PART gradients are averaged over all ranks,
so that all experts are equal, and from then on they are not (`--one`: only those of one pair of "dp"). `--declared`: what
`protect(replicas=...)` is told, right or wrong.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ftrun

WIDTH, INNER, BATCH = 12, 16, 6

parser = argparse.ArgumentParser()
parser.add_argument("--backend", required=True)
parser.add_argument("--out", required=True, type=Path)
parser.add_argument("--kind", choices=["tensor", "experts"], required=True)
parser.add_argument("--declared", choices=["dp", "tp", "world"])
parser.add_argument("--part", type=int, default=6)
parser.add_argument("--one", action="store_true")
parser.add_argument("--steps", type=int, default=12)
arguments = parser.parse_args()

dist.init_process_group(arguments.backend)
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
groups = {"dp": mesh["dp"].get_group(), "tp": mesh["tp"].get_group(), "world": dist.group.WORLD}
dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()


class Gathered(torch.autograd.Function):
    """Sums what the ranks of "tp" computed."""

    @staticmethod
    def forward(ctx, x):
        whole = x.clone()
        dist.all_reduce(whole, group=groups["tp"])
        return whole

    @staticmethod
    def backward(ctx, grad):
        return grad


class Spread(torch.autograd.Function):
    """Gives every rank of "tp" the same, and sums the gradients that come back."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        whole = grad.clone()
        dist.all_reduce(whole, group=groups["tp"])
        return whole


class Cut(nn.Module):
    """This rank's part of two layers; those of the other rank of "tp" begin with other values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(tp)
        self.up = nn.Linear(WIDTH, INNER // 2)
        self.down = nn.Linear(INNER // 2, WIDTH, bias=False)

    def forward(self, x):
        return Gathered.apply(self.down(torch.tanh(self.up(Spread.apply(x)))))


torch.manual_seed(1)
model = Cut() if arguments.kind == "tensor" else nn.Linear(WIDTH, WIDTH)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
job = ftrun.protect(model, optimizer, replicas=groups[arguments.declared] if arguments.declared else None)
for step in job.steps(arguments.steps):
    with step:
        source = torch.Generator().manual_seed(100 * step.index + (dp if arguments.kind == "tensor" else rank))
        x, y = torch.randn(BATCH, WIDTH, generator=source), torch.randn(BATCH, WIDTH, generator=source)
        (model(x) - y).square().mean().backward()
        parted = arguments.kind == "experts" and step.index >= arguments.part
        if not parted or (arguments.one and tp == 1):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=groups["dp" if arguments.kind == "tensor" or parted else "world"])
        optimizer.step()
        optimizer.zero_grad()


def digest(tensors) -> str:
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


state = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
result = {"weights": digest(model.parameters()), "optimizer": digest(state), "rng": digest([torch.get_rng_state()])}
arguments.out.mkdir(parents=True, exist_ok=True)
target = arguments.out / f"rank-{rank}.json"
target.with_suffix(".tmp").write_text(json.dumps(result))
os.replace(target.with_suffix(".tmp"), target)
dist.destroy_process_group()
