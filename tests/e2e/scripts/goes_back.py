"""Each rank trains a model of its own in four epochs, and dies where only a host snapshot has its state.

goes_back.py ftrun|gloo OUT range|epochs|calls
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ftrun

KILLS = ((2, 2, 1), (3, 1, 0), (3, 1, 2))  # epoch, step, rank


class Found:
    """What the evaluations gave."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


def main() -> None:
    backend, out, how = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found = Found()
    job = ftrun.protect(model, optimizer, found=found)

    def evaluate() -> float:
        total = model.weight.detach().sum() + torch.rand(())
        dist.all_reduce(total)
        return total.item()

    for epoch in range(4) if how == "range" else job.epochs(4):
        for step in job.steps(6):
            with step:
                model(torch.randn(4, 6)).square().mean().backward()
                dist.all_reduce(torch.zeros(1))
                optimizer.step()
                optimizer.zero_grad()
                mark = out / f"struck-{epoch}-{rank}"
                if backend == "ftrun" and (epoch, step.index, rank) in KILLS and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
        found.values.append(job.call(evaluate) if how == "calls" else evaluate())
    blobs = [repr(found.values).encode(), torch.get_rng_state().numpy().tobytes()]
    for parameter in model.parameters():
        blobs += [parameter.detach().numpy().tobytes(), optimizer.state[parameter]["momentum_buffer"].numpy().tobytes()]
    (out / f"digest-{rank}").write_text(hashlib.sha256(b"".join(blobs)).hexdigest())


if __name__ == "__main__":
    main()
