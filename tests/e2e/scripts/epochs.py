"""A loop for each epoch, with an evaluation between them that communicates: epochs.py ftrun|gloo OUT FAULTS.

FAULTS is a tuple of (epoch, where, rank): a step's index, "before", "after" or "updated"; each happens once. The first three
kill the rank: in a step, before the evaluation's collectives and after them; the last interrupts it after a step's update.
"""

from __future__ import annotations

import ast
import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ftrun


def main() -> None:
    backend, out, faults = sys.argv[1], Path(sys.argv[2]), ast.literal_eval(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    rank = dist.get_rank()

    def strike(epoch: int, where: int | str) -> None:
        mark = out / f"struck-{epoch}-{where}-{rank}"
        if (epoch, where, rank) not in faults or mark.exists():
            return
        mark.touch()
        if where == "updated":
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 2))
    ddp = nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 2, (96,)))
    torch.manual_seed(rank)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    job = ftrun.protect(ddp, opt)

    found = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        ddp.train()
        for step, (x, y) in job.batches(loader):
            with step:
                loss = nn.functional.cross_entropy(ddp(x), y)
                strike(epoch, step.index)
                loss.backward()
                opt.step()
                opt.zero_grad()
                strike(epoch, "updated")
        ddp.eval()
        strike(epoch, "before")
        with torch.no_grad():
            wrong = nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]) + rank
        dist.all_reduce(wrong)
        dist.barrier()
        every = [torch.zeros(3) for _ in range(dist.get_world_size())]
        dist.all_gather(every, torch.rand(3))
        found.append((wrong.item(), float(sum(every).sum())))
        strike(epoch, "after")
    blobs = [p.detach().numpy().tobytes() for p in model.parameters()]
    blobs += [v.numpy().tobytes() for p in model.parameters() for v in opt.state[p].values()]
    blobs += [repr(found).encode(), torch.get_rng_state().numpy().tobytes()]
    (out / f"digest-{rank}").write_text(hashlib.sha256(b"".join(blobs)).hexdigest())


if __name__ == "__main__":
    main()
