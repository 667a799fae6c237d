"""Trains, and strikes itself with one kind of fault every few steps; writes when (OUT/fired: kind, step, monotonic ns).

Runs under ftrun and, with `--backend gloo`, under torchrun or NVRx's ft_launcher (then it sends NVRx's heartbeats).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ftrun


def strike(kind: str, net: nn.Module) -> None:
    """The fault; those that come later in the step are made by the caller."""
    if kind == "exit":
        os._exit(3)
    elif kind == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exception":
        raise ValueError("a fault of the benchmark")
    elif kind == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hang":
        while True:
            pass
    elif kind == "gil":
        ctypes.PyDLL(None).sleep(600)
    elif kind == "corrupt":
        parameter = next(net.parameters())
        ctypes.c_uint32.from_address(parameter.data_ptr() + 64).value ^= 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--every", type=int, default=8, help="steps between two faults")
    parser.add_argument("--step", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--backend", choices=["ftrun", "gloo"], default="ftrun")
    parser.add_argument("--timeout", type=float, default=1800, help="of a collective, seconds")
    parser.add_argument("--nvrx", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1)
    dist.init_process_group(args.backend, timeout=timedelta(seconds=args.timeout))
    rank, size = dist.get_rank(), dist.get_world_size()
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    beat: Any = None
    if args.nvrx:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        beat = RankMonitorClient()
        beat.init_workload_monitoring()
    job = ftrun.protect(model=model, optimizer=optimizer)
    for step in job.steps(args.every * (args.times + 1)):
        due = step.index and step.index % args.every == 0 and step.index // args.every % size == rank
        marker = args.out / f"fired-{step.index}"
        mine = due and step.attempt == 0 and not marker.exists()
        with step:
            time.sleep(args.step)
            if beat is not None:
                beat.send_heartbeat()
            if mine:
                marker.touch()
                with (args.out / "fired").open("a") as file:
                    file.write(f"{args.kind} {step.index} {time.monotonic_ns()}\n")
                strike(args.kind, net)
            skipping = model.no_sync() if mine and args.kind == "collective" else nullcontext()
            with skipping:
                loss = model(torch.full((4, 64), 0.1 * (step.index + rank))).square().mean()
                (loss * float("nan") if mine and args.kind == "nonfinite" else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
