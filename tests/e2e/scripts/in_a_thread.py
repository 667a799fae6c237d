"""Trains in a thread beside the main one, which only waits for it, as a program with a window or a server does.

in_a_thread.py --backend ftrun|gloo --out FOLDER [--raise-at STEP]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS = 9
BUSY = (0, 4, 4)  # rank, step and world size that are busy in Python, and call nothing, until the step is done again
LONG = 30.0  # seconds


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    rank = dist.get_rank()
    torch.manual_seed(1)
    layers = [torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Dropout(0.1)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job: Any = None
    if args.backend == "ftrun":
        import ftrun

        job = ftrun.protect(model=model, optimizer=optimizer)
    torch.manual_seed(100 + rank)
    for step in job.steps(STEPS) if job else range(STEPS):
        with step if job else contextlib.nullcontext():
            index = step.index if job else step
            if job and (rank, index, dist.get_world_size()) == BUSY and not step.attempt:
                until = time.monotonic() + LONG
                while time.monotonic() < until:
                    pass
            if (rank, index) == (1, args.raise_at):
                raise ArithmeticError(f"step {index} cannot be done")
            optimizer.zero_grad()
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
    digest = hashlib.sha256()
    for tensor in (*model.state_dict().values(), torch.random.get_rng_state()):
        digest.update(tensor.numpy().tobytes())
    (args.out / f"rank-{rank}.txt").write_text(digest.hexdigest())
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--raise-at", type=int, default=-1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    thread = threading.Thread(target=train, args=(args,))
    thread.start()
    while thread.is_alive():
        time.sleep(0.02)


if __name__ == "__main__":
    main()
