"""Counts the collectives of each step by the size of their group, ftrun's own among them: `rounds.py --out FOLDER`.

They are counted where they enter a group of torch, so that no name of ftrun's is needed. Each rank writes FOLDER/rank-R.json.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftrun

STEPS, FIRST = 40, 12  # replicas are compared at the first gates, and at the last
COLLECTIVES = ("allreduce", "allgather", "_allgather_base", "alltoall", "alltoall_base", "broadcast", "barrier", "send", "recv")

each: list[collections.Counter[str]] = [collections.Counter()]


def counted(name: str) -> Any:
    """Return that method of torch's groups, which counts its calls."""
    original = getattr(dist.ProcessGroup, name)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        each[-1][f"{name} of {self.size()}"] += 1
        return original(self, *args, **options)

    return call


def main() -> None:
    for name in COLLECTIVES:
        setattr(dist.ProcessGroup, name, counted(name))
    dist.init_process_group("ftrun")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    job = ftrun.protect(model, optimizer, ignore=["each"])
    batch = torch.randn(4, 8)
    for step in job.steps(STEPS):
        each.append(collections.Counter())
        with step:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    Path(sys.argv[2]).mkdir(exist_ok=True)
    (Path(sys.argv[2]) / f"rank-{dist.get_rank()}.json").write_text(json.dumps(each[FIRST:-1]))
    dist.destroy_process_group()


main()
