"""What ftrun costs per step: blocks of protected and of stock steps take turns inside one run.

Two equal models in the same processes: one with the "ftrun" group under `protect`, one with a stock Gloo group of its
own and a plain loop. Rank 0 writes OUT/blocks.json: for the wall clock and for its own CPU time the median seconds per
step of each block, {"wall": [[stock, protected], ...], "cpu": ...}, where stock is the mean of the blocks before and
after, so that a machine that slowly changes its speed does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from itertools import islice, pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftrun

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import train_gpt

# DDP's reducer must not be the last to hold a Gloo group: it destroys it while it holds the GIL, which the group's threads
# may be waiting for
KEPT: list[dist.ProcessGroup] = []
STEP = 0.050  # seconds that a stock step is to take
FIRST_BATCH, ROUNDS, TRIES = 40, 3, 30  # to find the batch with which it does: rounds of so many steps
WARM = 20  # protected steps before the first block: buckets are rebuilt, and hidden updates are looked for in the first ones


def stock_group(folder: Path, rank: int, size: int) -> dist.ProcessGroup:
    """A Gloo group that ftrun knows nothing of."""
    store = dist.FileStore(str(folder / "stock-store"), size)
    group = dist.ProcessGroup(store, rank, size)
    inner = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, inner)
    group._set_default_backend(kind)
    group._set_group_name("stock")
    KEPT.append(group)
    return group


Moment = tuple[float, float]  # wall clock, CPU time of this process


def now() -> Moment:
    return time.perf_counter(), time.process_time()


def typical(moments: list[Moment]) -> Moment:
    """Median distance between neighbours: a machine that is busy with something else now and then does not count."""
    wall, cpu = (statistics.median(b - a for a, b in pairwise(times)) for times in zip(*moments, strict=True))
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--block", type=int, default=50, help="steps in a block")
    parser.add_argument("--size", choices=train_gpt.SIZES, default="small")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    device = torch.device("cpu")
    model, optimizer = train_gpt.build(args, device)
    stock_model, stock_optimizer = train_gpt.build(args, device)
    text = train_gpt.Text(args.seed)
    dist.init_process_group("ftrun")
    rank, size = dist.get_rank(), int(os.environ["WORLD_SIZE"])
    ddp = DistributedDataParallel(model)
    stock = DistributedDataParallel(stock_model, process_group=stock_group(args.out, rank, size))
    job = ftrun.protect(model=ddp, optimizer=optimizer)

    def stock_block(first: int, batch: int, length: int = args.block) -> Moment:
        times = [now()]
        for index in range(first, first + length):
            inputs, targets = text.batch("train", index, rank, batch, model.context)
            stock(inputs, targets).backward()
            stock_optimizer.step()
            stock_optimizer.zero_grad()
            times.append(now())
        return typical(times)

    def fitting_batch() -> int:
        batch = FIRST_BATCH
        for _ in range(ROUNDS):
            fitting = torch.tensor(batch * STEP / stock_block(0, batch, TRIES)[0])
            dist.all_reduce(fitting)
            batch = max(1, round(float(fitting) / size))
        return batch

    def protected_block(count: int) -> Moment:
        times = [now()]
        for step in islice(steps, count):
            with step:
                inputs, targets = text.batch("train", step.index, rank, batch, model.context)
                ddp(inputs, targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            times.append(now())
        return typical(times)

    batch = fitting_batch()
    steps = job.steps(WARM + args.blocks * args.block)
    protected_block(WARM)
    plain, protected = [stock_block(WARM, batch)], []
    for number in range(args.blocks):
        protected.append(protected_block(args.block))
        plain.append(stock_block(WARM + number * args.block, batch))
    assert next(steps, None) is None
    if rank == 0:
        found = {
            name: [[(a[i] + b[i]) / 2, ours[i]] for (a, b), ours in zip(pairwise(plain), protected, strict=True)]
            for i, name in enumerate(("wall", "cpu"))
        }
        (args.out / "blocks.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
