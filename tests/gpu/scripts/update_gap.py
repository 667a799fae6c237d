"""Large kernels, plain or protected: device time between the end of the backward and the start of the update; hashes."""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ftrun

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--plain", action="store_true")
args = parser.parse_args()

torch.use_deterministic_algorithms(True)
torch.cuda.set_device(0)
dist.init_process_group("ftrun")
torch.manual_seed(1)
gaps: list[tuple[Any, Any]] = []


class Timed(torch.optim.SGD):
    """Its step begins with an event: the device comes there when the gate let the update through."""

    def step(self, closure: Any = None) -> Any:
        gaps[-1][1].record()
        return super().step(closure)


model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(8))).cuda()
optimizer = Timed(model.parameters(), lr=1e-4)
job = None if args.plain else ftrun.protect(model=model, optimizer=optimizer, ignore=["gaps"])
x = torch.randn(4096, 4096, device="cuda")


def body() -> None:
    gaps.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
    model(x).square().mean().backward()
    gaps[-1][0].record()
    optimizer.step()
    optimizer.zero_grad()


begin = 0.0


def begin_timing(index: int) -> None:
    global begin
    if index == args.steps // 3:
        torch.cuda.synchronize()
        begin = time.perf_counter()


if job is None:
    for number in range(args.steps):
        begin_timing(number)
        body()
else:
    for step in job.steps(args.steps):
        begin_timing(step.index)
        with step:
            body()
torch.cuda.synchronize()
step_ms = 1e3 * (time.perf_counter() - begin) / (args.steps - args.steps // 3)
us = [1e3 * first.elapsed_time(then) for first, then in gaps[args.steps // 3 :]]
result = {
    "weights": hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest(),
    "step_ms": step_ms,
    "gap_us": statistics.median(us),
    "gap_most_us": max(us),
}
(args.out / "rank-0.json").write_text(json.dumps(result))
dist.destroy_process_group()
