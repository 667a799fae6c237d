"""A pipeline of `torch.distributed.pipelining`, with data parallelism within each stage or without.

pipelined.py --backend ftrun|gloo --out FOLDER [--schedule gpipe] [--dp 2] [--replicas]
    [--given] [--steps 10] [--die RANK:STEP:CALL:before|after]...

`--die`: this rank kills itself at its CALLth collective or point-to-point call (from 1) of that step, at the first try.
"""

import argparse
import hashlib
import json
import os
import random
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

import ftrun

WIDTH, BATCH, MICROBATCHES = 24, 16, 8
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
CALLS = ("send", "recv", "allreduce", "broadcast", "allgather", "reduce_scatter", "_allgather_base", "barrier")

parser = argparse.ArgumentParser()
parser.add_argument("--backend", required=True)
parser.add_argument("--out", required=True, type=Path)
parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
parser.add_argument("--dp", type=int, default=2)
parser.add_argument("--replicas", action="store_true", help="data parallelism by hand, not by DistributedDataParallel")
parser.add_argument("--given", action="store_true", help="hand the schedule to protect()")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--die", action="append", default=[])
arguments = parser.parse_args()

dist.init_process_group(arguments.backend)
rank, size = dist.get_rank(), dist.get_world_size()
stages = size // arguments.dp
mesh = init_device_mesh("cpu", (stages, arguments.dp), mesh_dim_names=("pp", "dp"))
pipe, twins = mesh["pp"].get_group(), mesh["dp"].get_group()
stage, twin = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()


class Part(nn.Module):
    """One stage: all have the same shapes. It counts its calls, and the dropout draws."""

    def __init__(self) -> None:
        super().__init__()
        # where torch finds the shapes out by a trial, it tries uninitialized memory, of which an average would be kept
        norm = nn.BatchNorm1d(2 * WIDTH, track_running_stats=not arguments.replicas)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), norm, nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.layers(x)


def build(index: int) -> nn.Module:
    torch.manual_seed(100 + index)
    part = Part()
    if arguments.dp > 1 and not arguments.replicas:
        return DistributedDataParallel(part, process_group=twins, bucket_cap_mb=0.005)
    return part


several = arguments.schedule == "interleaved"
mine = [stage, stage + stages] if several else [stage]
total = stages * len(mine)
models = [build(index) for index in mine]
cpu, micro = torch.device("cpu"), torch.zeros(BATCH // MICROBATCHES, WIDTH)


def part_of(index: int, model: nn.Module) -> PipelineStage:
    # DDP needs that torch is told the shapes: the trial backward that finds them out starts the reduction of gradients
    told = {"input_args": micro.clone().requires_grad_(index > 0), "output_args": micro.clone().requires_grad_()}
    return PipelineStage(model, index, total, cpu, group=pipe, **({} if arguments.replicas else told))


parts = [part_of(index, model) for index, model in zip(mine, models, strict=True)]
optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], lr=0.01)
schedule = SCHEDULES[arguments.schedule](parts if several else parts[0], MICROBATCHES, loss_fn=nn.MSELoss())
more = [schedule] if arguments.given else []
# calls: those that a repair makes are counted as well
job = ftrun.protect(models, optimizer, *more, replicas=mesh["dp"] if arguments.replicas else None, ignore=["calls"])
torch.manual_seed(rank)
random.seed(rank)

calls = 0
places = {tuple(map(int, text.split(":")[:3])): text.rsplit(":", 1)[1] for text in arguments.die}


def counted(name: str, kind: type) -> None:
    original = getattr(kind, name)

    def call(self, *args, **kwargs):
        global calls
        calls += 1
        die = places.get((rank, step.index, calls)) if step is not None and step.attempt == 0 else None
        if die == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        work = original(self, *args, **kwargs)
        if die == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return work

    setattr(kind, name, call)


step = None  # of the loop
if arguments.backend == "ftrun":
    for name in CALLS:
        counted(name, type(pipe))

for step in job.steps(arguments.steps):
    calls = 0
    with step:
        source = torch.Generator().manual_seed(1000 * step.index + twin)  # every rank of a pipeline knows the batch
        x, y = torch.randn(BATCH, WIDTH, generator=source), torch.randn(BATCH, WIDTH, generator=source)
        found = []
        if stage == 0:
            schedule.step(x)
        elif stage == stages - 1:
            schedule.step(target=y, losses=found)
        else:
            schedule.step()
        if arguments.replicas and arguments.dp > 1:
            for model in models:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, group=twins)
                    parameter.grad /= arguments.dp
        optimizer.step()
        optimizer.zero_grad()


def digest(tensors) -> str:
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


state = [v for p in optimizer.param_groups[0]["params"] for k, v in sorted(optimizer.state[p].items())]
result = {
    "weights": digest(p for model in models for p in model.parameters()),
    "buffers": digest(b for model in models for b in model.buffers()),
    "optimizer": digest(state),
    "rng": digest([torch.get_rng_state()]),
}
arguments.out.mkdir(parents=True, exist_ok=True)
target = arguments.out / f"rank-{rank}.json"
target.with_suffix(".tmp").write_text(json.dumps(result))
os.replace(target.with_suffix(".tmp"), target)
dist.destroy_process_group()
