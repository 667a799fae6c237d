"""A model of many small kernels, plain or protected, eager or with forward and backward in a CUDA graph: ms a step, and hashes."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional

import ftrun

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--plain", action="store_true")
parser.add_argument("--graph", action="store_true")
args = parser.parse_args()

torch.use_deterministic_algorithms(True)
torch.cuda.set_device(0)
dist.init_process_group("ftrun")
torch.manual_seed(1)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(40))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
job = None if args.plain else ftrun.protect(model=model, optimizer=optimizer)
x = torch.zeros(32, 64, device="cuda")


def compute(given: torch.Tensor) -> torch.Tensor:
    for layer in model:
        given = functional.relu(functional.linear(given, layer.weight, layer.bias)) + given
    return given.square().mean()


def forward_and_backward() -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()
    (compute(x) if args.graph else model(x).square().mean()).backward()


graph = torch.cuda.CUDAGraph()
if args.graph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward_and_backward()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        forward_and_backward()


def body(index: int) -> None:
    x.copy_(torch.randn(32, 64, generator=torch.Generator().manual_seed(index)))
    if args.graph:
        graph.replay()
    else:
        forward_and_backward()
    optimizer.step()


last = {"at": 0.0}


def begin_timing(index: int) -> None:
    if index == args.steps // 3:
        torch.cuda.synchronize()
        last["at"] = time.perf_counter()


if job is None:
    for number in range(args.steps):
        begin_timing(number)
        body(number)
else:
    for step in job.steps(args.steps):
        begin_timing(step.index)
        with step:
            body(step.index)
torch.cuda.synchronize()
step_ms = 1e3 * (time.perf_counter() - last["at"]) / (args.steps - args.steps // 3)
weights = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()
(args.out / "rank-0.json").write_text(json.dumps({"weights": weights, "step_ms": step_ms}))
dist.destroy_process_group()
