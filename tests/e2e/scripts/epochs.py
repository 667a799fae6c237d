"""A loop for each epoch, with an evaluation between them that communicates: epochs.py ftrun|gloo OUT FAULTS [resumes] [calls] [late].

FAULTS is a tuple of (epoch, where, rank): a step's index, "before", "between", "after" or "updated"; each happens once. All but
the last kill the rank: in a step, before the evaluation's collectives, between two of them and after them; the last interrupts it
after a step's update.

`calls`: the evaluation is a function that is given to `job.call`.
`late`: rank 3 asks for the result of the evaluation's last collective half a second after it is there.
`resumes`: by `job.epochs`, with a snapshot of its own after each epoch, from which the script goes on when it finds one.
"""

from __future__ import annotations

import ast
import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ftrun


class Found:
    """What the evaluations gave."""

    def __init__(self) -> None:
        self.values: list[tuple[float, float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


def main() -> None:
    backend, out, faults = sys.argv[1], Path(sys.argv[2]), ast.literal_eval(sys.argv[3])
    resumes, calls, late = (word in sys.argv[4:] for word in ("resumes", "calls", "late"))
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
    snapshot, start, found = out / "snapshot.pt", 0, Found()
    if resumes and snapshot.exists():
        state = torch.load(snapshot, weights_only=True)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        found.load_state_dict(state["found"])
        start = state["epoch"]
    job = ftrun.protect(ddp, opt, found=found)

    def evaluate(epoch: int) -> tuple[float, float]:
        ddp.eval()
        strike(epoch, "before")
        with torch.no_grad():
            wrong = nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]) + rank
        dist.all_reduce(wrong)
        strike(epoch, "between")
        dist.barrier()
        every = [torch.zeros(3) for _ in range(dist.get_world_size())]
        gathered = dist.all_gather(every, torch.rand(3), async_op=True)
        if late and rank == 3:
            time.sleep(0.5)
        gathered.wait()
        return wrong.item(), float(sum(every).sum())

    for epoch in job.epochs(4, start=start) if resumes else range(4):
        with (out / f"began-{rank}").open("a") as began:
            began.write(f"{epoch} {os.getpid()}\n")
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
        if calls:
            found.values.append(job.call(evaluate, epoch))
        else:
            found.values.append(evaluate(epoch))
        strike(epoch, "after")
        if resumes and rank == 0:
            kept = {"model": model.state_dict(), "opt": opt.state_dict(), "found": found.state_dict()}
            torch.save({**kept, "epoch": epoch + 1}, snapshot)
    blobs = [p.detach().numpy().tobytes() for p in model.parameters()]
    blobs += [v.numpy().tobytes() for p in model.parameters() for v in opt.state[p].values()]
    blobs += [repr(found.values).encode(), torch.get_rng_state().numpy().tobytes()]
    (out / f"digest-{rank}").write_text(hashlib.sha256(b"".join(blobs)).hexdigest())


if __name__ == "__main__":
    main()
    time.sleep(0.1)  # a Gloo thread of plain torch that gives up a tensor while the interpreter ends aborts the process
