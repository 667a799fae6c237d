"""Trains on the fake GPU, whose kernels take long, and writes when ftrun's own code made which calls, step by step."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftrun

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.gpu.gpu_model import Gpu, QueuedSGD

OWN = os.path.dirname(ftrun.__file__) + os.sep
FIRST = 3  # bodies are looked at as a whole
STEPS, LAYERS = 12, 100
LONG = 1 << 17  # bytes that the last kernel of a backward moves, and of an update


class LongSGD(QueuedSGD):
    """Its last kernel takes as long as one of a large model."""

    def __init__(self, params: object, gpu: Gpu) -> None:
        super().__init__(params, gpu)
        self.scratch = gpu.like(torch.zeros(2, LONG, dtype=torch.uint8))

    def step(self) -> None:
        super().step()
        self._gpu.copy(self.scratch[0], self.scratch[1])


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("ftrun")
    rank = dist.get_rank()
    gpu = Gpu(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(7)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(LAYERS)], torch.nn.BatchNorm1d(8))
    gpu.take(model)
    # the last rank arrives last, and finds the gate open
    scratch = gpu.like(torch.zeros(2, (1 + 2 * rank) * LONG, dtype=torch.uint8))
    ddp = DistributedDataParallel(model)
    gpu.order(ddp)
    optimizer = LongSGD(ddp.parameters(), gpu)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    steps: list[list[tuple[int, str, str]]] = []
    ignored = ["steps", "seen", "scratch", "optimizer 0._in_flight", "optimizer 0.scratch"]
    job = ftrun.protect(ddp, optimizer, scheduler, ignore=ignored)

    def seen(frame: FrameType, event: str, what: Any) -> None:
        code = frame.f_code
        if code.co_filename.startswith(OWN):
            name = f"{code.co_filename[len(OWN) :]}:{code.co_name}"
            if event.startswith("c_"):
                name += f" -> {getattr(what, '__qualname__', what)}"
            steps[-1].append((time.monotonic_ns(), event, name))

    for step in job.steps(STEPS):
        sys.setprofile(None)
        steps.append([])
        if FIRST <= step.index < STEPS - 1:  # the last one's end is looked at
            sys.setprofile(seen)
        with step:
            ddp(torch.randn(4, 8)).square().mean().backward()
            gpu.copy(scratch[0], scratch[1])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    sys.setprofile(None)
    gpu.synchronize()
    (out / f"calls-{rank}.json").write_text(json.dumps({"pid": os.getpid(), "steps": steps[FIRST:-1]}))
    dist.destroy_process_group()


main()
