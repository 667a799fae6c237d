"""The training script whose end state is compared bit for bit: under torchrun, under ftrun, under ftrun with faults.

Every rank writes OUT/rank-R.json: digests of weights, optimizer state, buffers and random streams, the batches it
consumed and the losses it saw in committed attempts. Each process appends one line to OUT/rank-R.log when it does its
first step: its pid and the inode of the memory under its parameters. `--backend gloo` is stock torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ftrun

FEATURES = 24
OUTPUTS = 5


class Net(nn.Module):
    """Layers are defined in another order than they are used, so that DDP's rebuilt buckets differ from the first."""

    def __init__(self, width: int, private: bool) -> None:
        super().__init__()
        self.last = nn.Linear(width, OUTPUTS)
        self.third = nn.Linear(width, width)
        self.first = nn.Linear(FEATURES, width)
        self.norm2 = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)
        self.norm1 = nn.BatchNorm1d(width)
        self.fourth = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)
        if private:
            self.private = nn.Parameter(torch.zeros(OUTPUTS))  # DDP leaves it alone: every rank has its own
        self.has_private = private

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.first(x)))
        x = x + self.drop(torch.relu(self.norm2(self.second(x))))
        x = x + torch.tanh(self.third(x))
        x = x + self.drop(torch.tanh(self.fourth(x)))
        y = self.last(x)
        return y + self.private if self.has_private else y


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Rows that are changed at random each time they are read, in the process that reads them."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        fixed = torch.Generator().manual_seed(index)
        x = torch.randn(FEATURES, generator=fixed)
        noise = torch.randn(FEATURES) * (0.1 + 0.1 * random.random())
        return x + noise, torch.randn(OUTPUTS, generator=fixed)


class Record:
    """What was consumed by attempts that were not taken back; given to protect(), so it is rewound and restored."""

    def __init__(self) -> None:
        self.batches: list[str] = []
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"batches": list(self.batches), "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches, self.losses = list(state["batches"]), list(state["losses"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=["ftrun", "gloo"], default="ftrun")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--optim", choices=["adamw", "sgdm"], default="adamw")
    parser.add_argument("--accum", choices=["none", "inside", "across"], default="none")
    parser.add_argument("--order", choices=["early", "late"], default="early")
    parser.add_argument("--data", choices=["index", "loader"], default="index")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--two-optims", action="store_true")
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--private", action="store_true", help="a parameter that DDP does not synchronize")
    parser.add_argument("--local-buffers", action="store_true", help="each rank keeps its own BatchNorm statistics")
    parser.add_argument("--fused", action="store_true", help="fused optimizer kernels")
    parser.add_argument("--bucket-views", action="store_true", help="gradients are views of DDP's buckets")
    parser.add_argument("--clip", type=float, help="largest norm of the gradients")
    parser.add_argument("--autocast", action="store_true", help="the forward pass in bfloat16")
    parser.add_argument("--compile", action="store_true", help="the module through torch.compile and Inductor")
    parser.add_argument("--stretch", type=float, default=0.0, help="seconds added to each phase of a step")
    return parser.parse_args()


def build(args: argparse.Namespace) -> tuple[Net, list[torch.optim.Optimizer]]:
    torch.manual_seed(args.seed)
    net = Net(args.width, args.private)
    late = [p for n, p in net.named_parameters() if n.startswith(("last", "fourth"))]
    early = [p for n, p in net.named_parameters() if not n.startswith(("last", "fourth"))]
    groups = [early, late] if args.two_optims else [early + late]
    if args.optim == "adamw":
        return net, [torch.optim.AdamW(g, lr=0.01, fused=args.fused) for g in groups]
    return net, [torch.optim.SGD(g, lr=0.05, momentum=0.9, dampening=0.1, fused=args.fused) for g in groups]


def batches(args: argparse.Namespace, job: Any) -> Iterator[tuple[Any, tuple[Tensor, Tensor] | None]]:
    """(step, batch) pairs; with --data index the batch is made from step.index later."""
    if args.data == "index":
        yield from ((step, None) for step in job.steps(args.steps))
        return
    world, rank = dist.get_world_size(), dist.get_rank()
    per_epoch = -(-args.steps // args.epochs)
    data = Augmented(per_epoch * args.batch * world)
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=args.workers)
    yield from job.batches(loader, epochs=args.epochs)


def indexed(args: argparse.Namespace, index: int, rank: int) -> tuple[Tensor, Tensor]:
    chosen = torch.Generator().manual_seed((args.seed * 100_003 + index) * 101 + rank)
    return torch.randn(args.batch, FEATURES, generator=chosen), torch.randn(args.batch, OUTPUTS, generator=chosen)


def sha(parts: Iterator[Any] | list[Any]) -> str:
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            total.update(f"{part.dtype}{tuple(part.shape)}".encode())
            part = part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        total.update(part if isinstance(part, bytes) else repr(part).encode())
    return total.hexdigest()


def optimizer_parts(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    raw = optimizer.state_dict()
    for index in sorted(raw["state"]):
        for key in sorted(raw["state"][index]):
            yield f"{index}.{key}"
            yield raw["state"][index][key]
    for group in raw["param_groups"]:
        yield sorted((k, v) for k, v in group.items())


def inode_under(address: int) -> int:
    """Inode of the file mapped at `address`, 0 for anonymous memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        low, high = (int(x, 16) for x in fields[0].split("-"))
        if low <= address < high:
            return int(fields[4])
    raise LookupError(hex(address))


def noted(ddp: DistributedDataParallel, what: str) -> list[str]:
    """What DDP's logger says of each bucket."""
    return str(ddp._get_ddp_logging_data().get(what, "")).split(", ")


def main() -> None:
    args = parse()
    if args.order == "early":
        net, optimizers = build(args)
        dist.init_process_group(args.backend)
    else:
        seen_first = int(os.environ["LOCAL_RANK"])
        dist.init_process_group(args.backend)
        assert seen_first == dist.get_rank()
        net, optimizers = build(args)
    rank = dist.get_rank()
    if args.private:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["private"])
        with torch.no_grad():
            net.private.fill_(0.1 * (rank + 1))
    ddp = DistributedDataParallel(
        net,
        bucket_cap_mb=0.006,
        broadcast_buffers=not args.local_buffers,
        gradient_as_bucket_view=args.bucket_views,
    )
    if args.compile:
        torch._dynamo.config.optimize_ddp = (
            False  # it asserts that the first bucket is the smallest, which it is not here
        )
    called = torch.compile(ddp) if args.compile else ddp
    torch.manual_seed(args.seed * 1000 + rank)
    random.seed(args.seed * 1000 + rank)
    np.random.seed(args.seed * 1000 + rank)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.9) for o in optimizers]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) if args.scaler else None
    record = Record()

    extra: dict[str, Any] = {f"scheduler{i}": s for i, s in enumerate(schedulers)} | {"record": record}
    if scaler is not None:
        extra["scaler"] = scaler
    job = ftrun.protect(
        model=ddp, optimizer=optimizers if args.two_optims else optimizers[0], ignore=["first"], **extra
    )

    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / f"rank-{rank}.log"
    first = True
    for step, batch in batches(args, job):
        time.sleep(args.stretch)
        x, y = batch if batch is not None else indexed(args, step.index, rank)
        x = (
            x + 0.05 * np.random.standard_normal() + 0.05 * random.random()
        )  # drawn before the body: belongs to the step
        with step:
            if first:
                first = False
                inode = inode_under(next(net.parameters()).data_ptr())
                with log.open("a") as file:
                    file.write(json.dumps({"pid": os.getpid(), "step": step.index, "inode": inode}) + "\n")
            x = x * (1.0 + 0.05 * torch.rand(1)) + 0.05 * random.random() + 0.05 * np.random.random()
            record.batches.append(sha([x, y])[:12])
            steps_optimizer = args.accum != "across" or step.index % 2 == 1
            halves = [(x[::2], y[::2]), (x[1::2], y[1::2])] if args.accum == "inside" else [(x, y)]
            total = 0.0
            for number, (inputs, targets) in enumerate(halves):
                final = number == len(halves) - 1 and steps_optimizer
                with nullcontext() if final else ddp.no_sync():
                    with torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
                        loss = (called(inputs.float()) - targets).square().mean()
                    time.sleep(args.stretch)
                    (loss if scaler is None else scaler.scale(loss)).backward()
                    total += loss.item()
            record.losses.append(total)
            # ranks reach the gate one after the other, so that some wait there
            time.sleep(args.stretch * ((rank + step.index) % dist.get_world_size()))
            if steps_optimizer:
                if args.clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), args.clip)
                for optimizer in optimizers:
                    if scaler is None:
                        optimizer.step()
                    else:
                        scaler.step(optimizer)
                time.sleep(args.stretch)
                if scaler is not None:
                    scaler.update()
                for scheduler in schedulers:
                    scheduler.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
    result = {
        "weights": sha([t for n, t in sorted(net.named_parameters()) if n != "private"]),
        "private": net.private.tolist() if args.private else None,
        "buffers": sha([t for _, t in sorted(net.named_buffers())]),
        "optimizer": sha([part for o in optimizers for part in optimizer_parts(o)]),
        "schedule": [s.state_dict()["last_epoch"] for s in schedulers],
        "scaler": scaler.state_dict() if scaler is not None else None,
        "rng_python": sha([random.getstate()]),
        "rng_numpy": sha([part.tobytes() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]),
        "rng_torch": sha([torch.get_rng_state()]),
        "batches": record.batches,
        "losses": record.losses,
        "buckets": len(noted(ddp, "rebuilt_bucket_sizes")),
        "layout": noted(ddp, "rebuilt_per_bucket_param_indices"),
        "pid": os.getpid(),
        "history": [json.loads(line) for line in log.read_text().splitlines()],
    }
    target = args.out / f"rank-{rank}.json"
    target.with_suffix(".tmp").write_text(json.dumps(result))
    os.replace(target.with_suffix(".tmp"), target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
