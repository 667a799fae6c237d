"""A rank that comes a second time takes longer, at a place of choice, than the collectives' timeout.

late_replacement.py --backend ftrun|gloo --where start|loop --groups N --out FOLDER
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 3.0  # seconds that a collective may take
LATE = 7.0  # seconds that a replacement takes
STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--where", choices=["start", "loop"], required=True)
    parser.add_argument("--groups", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    been_here = args.out / f"been-{os.environ['RANK']}"

    def late(where: str) -> None:
        if args.where == where and been_here.exists():
            time.sleep(LATE)

    late("start")
    wait = timedelta(seconds=TIMEOUT)
    dist.init_process_group(args.backend, timeout=wait)
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(size)), timeout=wait) for _ in range(args.groups)]
    torch.manual_seed(1)
    layers = [torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Dropout(0.1)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps: Any = ((contextlib.nullcontext(), index) for index in range(STEPS))
    if args.backend == "ftrun":
        import ftrun

        job = ftrun.protect(model=model, optimizer=optimizer)
        steps = ((step, step.index) for step in job.steps(STEPS))
        late("loop")
        been_here.touch()
    torch.manual_seed(100 + rank)
    for step, _ in steps:
        with step:
            optimizer.zero_grad()
            model(torch.randn(16, 32)).square().mean().backward()
            total = torch.full((1,), float(rank))
            for group in groups:
                dist.all_reduce(total, group=group)
            optimizer.step()
    digest = hashlib.sha256()
    for tensor in (*model.state_dict().values(), torch.random.get_rng_state()):
        digest.update(tensor.numpy().tobytes())
    (args.out / f"rank-{rank}.txt").write_text(digest.hexdigest())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
