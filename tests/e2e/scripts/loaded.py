"""Epochs by `job.epochs` and `job.batches`, with loader workers that draw at random, and an evaluation after each.

loaded.py --backend ftrun|gloo --out FOLDER [--epochs 10] [--batches 16] [--workers 2] [--stretch SECONDS]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reference import optimizer_parts, sha
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ftrun

WIDTH, BATCH = 12, 4


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Rows that differ each time they are read: a loader that is put back must draw again what it drew."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.full((WIDTH,), index / self.rows) + torch.randn(WIDTH)
        return x, x.sin().sum(0, keepdim=True)


class Seen:
    """The losses of committed steps and the scores of the evaluations."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.scores: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "scores": list(self.scores)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.scores = list(state["losses"]), list(state["scores"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--stretch", type=float, default=0.0, help="seconds added to each step")
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(WIDTH, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 1))
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
    data = Noisy(args.batches * BATCH * world)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=args.workers)
    held_out = torch.randn(32, WIDTH)
    seen = Seen()
    torch.manual_seed(100 + rank)
    job = ftrun.protect(model, optimizer, scheduler=scheduler, seen=seen)

    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            score = (net(held_out) - held_out.sin().sum(1, keepdim=True)).square().mean() + torch.rand(())
        model.train()
        dist.all_reduce(score)
        return float(score)

    for epoch in job.epochs(args.epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in job.batches(loader):
            time.sleep(args.stretch)
            with step:
                loss = (model(x) - y).square().mean()
                loss.backward()
                seen.losses.append(loss.item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        seen.scores.append(job.call(evaluate))

    result = {
        "weights": sha(list(net.parameters())),
        "buffers": sha(list(net.buffers())),
        "optimizer": sha(list(optimizer_parts(optimizer))),
        "schedule": scheduler.last_epoch,
        "rng_torch": sha([torch.get_rng_state()]),
        "losses": seen.losses,
        "scores": seen.scores,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / f"rank-{rank}.json"
    target.with_suffix(".tmp").write_text(json.dumps(result))
    os.replace(target.with_suffix(".tmp"), target)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
