"""Counts the Python calls in ftrun's own code, step by step: `counted.py TENSORS LAYERS FILE`, LAYERS > 0 for that many of FSDP2."""

from __future__ import annotations

import collections
import json
import os
import sys
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ftrun

OWN = os.path.dirname(ftrun.__file__) + os.sep
STEPS, FIRST = 40, 12


def main() -> None:
    tensors, layers, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("ftrun")
    torch.manual_seed(0)
    net: Any = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(tensors // 2)])
    for part in net[:layers]:
        fully_shard(part)
    model = fully_shard(net) if layers else DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    each: list[collections.Counter[str]] = []
    collectives: list[int] = []
    job = ftrun.protect(model, optimizer, scheduler, ignore=["each", "collectives"])

    def called(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(OWN):
            each[-1][f"{name[len(OWN) :]}:{frame.f_code.co_name}"] += 1

    batch = torch.randn(4, 8)
    for step in job.steps(STEPS):
        sys.setprofile(None)
        if step.index >= FIRST:
            each.append(collections.Counter())
            sys.setprofile(called)
        with step:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            scheduler.step()
    sys.setprofile(None)
    collectives = [counts["worker/comm/process_group.py:_collective"] for counts in each]
    if dist.get_rank() == 0:
        with open(file, "w") as out:
            json.dump({"calls": each[:-1], "collectives": collectives[:-1]}, out)
    dist.destroy_process_group()


main()
