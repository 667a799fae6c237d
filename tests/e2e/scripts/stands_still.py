"""A script whose ranks wait for each other by means that are not ftrun's, so that a replacement waits for ever.

stands_still.py --case files|group|late-group --out FOLDER [--forgive N]
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ftrun


def meet(folder: Path, rank: int, size: int, forgive: int) -> None:
    """Wait until all ranks have come here as often as this one. The incarnation number `forgive` of a rank does not wait."""
    number = len(list(folder.glob(f"came-{rank}-*")))
    (folder / f"came-{rank}-{number}").touch()
    while number != forgive and not all((folder / f"came-{r}-{number}").exists() for r in range(size)):
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--forgive", type=int, default=-1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("ftrun")
    if args.case == "files":
        meet(args.out, rank, size, args.forgive)
    if args.case == "group":
        dist.new_group(backend="gloo")
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = ftrun.protect(model, optimizer)
    if args.case == "late-group":
        dist.new_group(backend="gloo")
    for step in job.steps(8):
        with step:
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
