"""The measured script whose steps are nearly all overhead: many tiny tensors, DDP, fused AdamW.

`--tensors N`: half of them weights of 64 numbers, half biases of 8; the loss reads each once, so that torch does as little as it can.
`--values N`: the loop changes N numbers of the script's own; `--history N`: it adds to a list of N; nothing of that is kept where
BENCH_VARIABLES=off. Every rank appends to OUT/rank-R.times what train.py writes there. `--profile S` writes OUT/parts.json: where
the last S steps spent their time in ftrun's code (parts.py), after S steps that were timed without.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent))

import parts
from start_noop import hold

import ftrun


class Box:
    """Holds the numbers that the loop changes."""


class Many(nn.Module):
    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(tensors // 2))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        every = [p.flatten() for layer in self.layers for p in (layer.weight, layer.bias)]
        return scale * torch.cat(every).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=["ftrun", "torchrun"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--values", type=int, default=0)
    parser.add_argument("--history", type=int, default=0)
    parser.add_argument("--profile", type=int, default=0, metavar="S")
    args = parser.parse_args()
    torch.manual_seed(1)
    model = Many(args.tensors)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    dist.init_process_group("ftrun" if args.system == "ftrun" else "gloo")
    times = os.open(args.out / f"rank-{dist.get_rank()}.times", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    net = DistributedDataParallel(model, gradient_as_bucket_view=True)
    scale = torch.ones(())
    profile = parts.Profile(Path(ftrun.__file__).parent)
    box, history = Box(), [index / 3 for index in range(args.history)]
    vars(box).update((f"value{number}", 0.0) for number in range(args.values))
    steps: Any
    if args.system == "ftrun":
        variables = os.environ.get("BENCH_VARIABLES", "auto")
        job = ftrun.protect(model=net, optimizer=optimizer, ignore=["profile", "steps"], variables=variables)
        steps = ((step, step.index) for step in job.steps(args.steps))
    else:
        steps = ((nullcontext(), index) for index in range(args.steps))
    for step, index in steps:
        if args.profile and index == args.steps - args.profile:
            profile.start()
        with step:
            for name in vars(box):
                setattr(box, name, index + 0.5)
            if args.history:
                history.append(index / 7)
            net(scale).backward()
            optimizer.step()
            optimizer.zero_grad()
        os.write(times, f"done {index} {time.monotonic_ns()} {os.getpid()} {time.process_time_ns()}\n".encode())
    if args.profile:
        profile.stop(args.out / "parts.json")
    hold(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
