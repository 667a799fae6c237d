"""Epochs over a loader whose processes draw random numbers: loader_processes.py OUT KIND FAULTS, converted where CONVERTED=1.

FAULTS is a tuple of (epoch, where, rank): a step's index in its epoch, or "before" the loader is asked for its first batch.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

CONVERTED = os.environ.get("CONVERTED") == "1"


def drawn(index: int) -> torch.Tensor:
    x = torch.randn(8, generator=torch.Generator().manual_seed(index)) + 0.1 * torch.randn(8)
    return x * (1 + 0.1 * random.random()) + 0.1 * float(np.random.random())


class Data(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.own = random.Random(1)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return drawn(index) + 0.1 * self.own.random()


class Stream(IterableDataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        yield from (drawn(index) for index in range(info.id, 16, info.num_workers))


def loader_of(kind: str) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Stream(), 4, num_workers=2, persistent_workers=True)
    data, keeps = Data(), kind != "anew"
    sampler = DistributedSampler(data) if kind == "distributed" else torch.utils.data.RandomSampler(data, num_samples=16)
    return DataLoader(data, 4, sampler=sampler, num_workers=2, persistent_workers=keeps)


def rounds(job: Any, loader: DataLoader[Any]) -> Iterator[tuple[Any, int, torch.Tensor]]:
    if job is None:
        yield from ((contextlib.nullcontext(), place, x) for place, x in enumerate(loader))
    else:
        for step, x in job.batches(loader):
            yield step, step.index, x


def main() -> None:
    out, kind, faults = Path(sys.argv[1]), sys.argv[2], ast.literal_eval(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if CONVERTED:
        import ftrun
    dist.init_process_group("ftrun" if CONVERTED else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1)))
    opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    torch.manual_seed(rank)
    loader = loader_of(kind)
    job = ftrun.protect(ddp, opt) if CONVERTED else None

    def strike(epoch: int, where: int | str) -> None:
        mark = out / f"struck-{epoch}-{where}-{rank}"
        if (epoch, where, rank) in faults and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    for epoch in range(3) if job is None else job.epochs(3):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        strike(epoch, "before")
        for step, place, x in rounds(job, loader):
            with step:
                strike(epoch, place)
                (ddp(x) - x.sum(1, keepdim=True)).square().mean().backward()
                opt.step()
                opt.zero_grad()
    blobs = [p.detach().numpy().tobytes() for p in ddp.parameters()]
    blobs += [v.numpy().tobytes() for p in ddp.parameters() for v in opt.state[p].values()]
    (out / f"digest-{rank}").write_text(hashlib.sha256(b"".join(blobs) + torch.get_rng_state().numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main()
    time.sleep(0.1)  # a Gloo thread of plain torch that gives up a tensor while the interpreter ends aborts the process
