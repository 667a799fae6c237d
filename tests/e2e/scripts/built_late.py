"""LOCAL_RANK is read first and the model built after it; each process notes what it built: built_late.py OUT.

In plain python it only builds and notes. Each note is a digest of the weights and of where the random stream stands.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ftrun

STEPS = 6


def build() -> tuple[torch.nn.Module, str]:
    torch.manual_seed(17)
    layers = [torch.nn.Linear(96, 250), torch.nn.ReLU(), torch.nn.LSTM(250, 64)]
    model = torch.nn.ModuleList([*layers, torch.nn.Linear(64, 96), torch.nn.Conv1d(16, 96, 7)])
    sha = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for parameter in model.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    return model, sha.hexdigest()


def main() -> None:
    out = Path(sys.argv[1])
    rank = os.environ["LOCAL_RANK"] if "FTRUN_RUN_DIR" in os.environ else "plain"
    torch.set_num_threads(1)
    model, digest = build()
    (out / f"{rank}-{os.getpid()}").write_text(digest)
    if rank == "plain":
        return
    dist.init_process_group("ftrun")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = ftrun.protect(model=model, optimizer=optimizer, replicas=dist.group.WORLD)
    for step in job.steps(STEPS):
        with step:
            loss = torch.stack([p.square().sum() for p in model.parameters()]).sum()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
