"""A sharded model whose end state is compared bit for bit: FSDP2, HSDP, tensor parallelism, and both.

Sizes are uneven, one shard is empty, the root has parameters of its own, two layers are tied and a bias is frozen. Every rank
writes OUT/rank-R.json with digests of its own shards. `--kills`: from step 1 on a rank dies in each step, before the first
collective of the body in the first of them, after it in the second, before the second one in the third, and so on; `--freezes`: it
stops there. `--raise-every N`: in every second step a rank raises an exception, N Python calls inside torch's FSDP later each time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from packed_sgd import PackedSGD, parts_of
from reference import FEATURES, OUTPUTS, Record, indexed, sha
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import ftrun


class Block(nn.Module):
    def __init__(self, width: int, tied: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        if tied:
            self.down.weight = self.up.weight
        self.drop = nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.up(x) - self.mean.to(x.dtype))
        self.mean += 0.1 * (y.detach().float().mean() - self.mean)
        return x + self.drop(self.down(y))


class Net(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        tied = "tp" not in args.layout
        self.first = nn.Linear(FEATURES, args.width)
        self.blocks = nn.ModuleList([Block(args.width, tied), Block(args.width, False)])
        self.scale = nn.Parameter(torch.ones(args.width))
        self.last = nn.Linear(args.width, OUTPUTS)
        self.blocks[1].down.bias.requires_grad_(False)
        self.checkpoint = args.checkpoint

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
        return self.last(x * self.scale)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=["ftrun", "gloo"], default="ftrun")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layout", choices=["fsdp", "hsdp", "tp", "fsdp-tp"], default="fsdp")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--width", type=int, default=47)
    parser.add_argument("--optim", choices=["adamw", "sgdm", "packed"], default="adamw")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--accum", choices=["none", "inside", "across"], default="none")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--bf16", action="store_true", help="bfloat16 parameters in the forward, sums in float32")
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing")
    parser.add_argument("--prefetch", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--decay", action="store_true", help="the script changes the weights after the update")
    parser.add_argument("--kills", action="store_true")
    parser.add_argument("--freezes", action="store_true")
    parser.add_argument("--raise-every", type=int, default=0)
    args = parser.parse_args()
    args.width += args.width % 2 if "tp" in args.layout else 0  # tensor parallelism takes no uneven sizes
    return args


def shard(net: Net, args: argparse.Namespace) -> DeviceMesh | None:
    """Lay the model over the ranks. Gives the mesh dimension that holds replicas which no placement tells of."""
    size = dist.get_world_size()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    if args.layout == "fsdp":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    elif args.layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        whole = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in net.blocks:
            parallelize_module(
                block, whole["tp"], {"up": ColwiseParallel(output_layouts=None), "down": RowwiseParallel()}
            )
        mesh = whole["dp"]
        if args.layout == "tp":
            return mesh
    for block in net.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    if args.prefetch:
        net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1]])
        net.blocks[1].set_modules_to_backward_prefetch([net.blocks[0]])
    return None


def local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Striker:
    """Counts the collectives of a body, and kills or stops this process at one of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.signal = signal.SIGSTOP if args.freezes else signal.SIGKILL
        self.count = 0
        self.at = -1
        self.after = False
        self.most = args.out / f"collectives-{dist.get_rank()}"
        kind: Any = type(dist.group.WORLD)
        inner = kind._collective

        def wrapped(group: Any, name: str, given: Any, kwargs: Any) -> Any:
            number, self.count = self.count, self.count + 1
            if number == self.at and not self.after:
                os.kill(os.getpid(), self.signal)
            work = inner(group, name, given, kwargs)
            if number == self.at:
                work.wait()
                os.kill(os.getpid(), self.signal)
            return work

        kind._collective = wrapped

    def body(self, step: Any) -> None:
        self.count, self.at = 0, -1
        if step.attempt == 0 and step.index >= 1 and step.index % dist.get_world_size() == dist.get_rank():
            self.at, self.after = (step.index - 1) // 2, step.index % 2 == 0

    def computed(self) -> None:
        pass

    def ended(self) -> None:
        self.at = -1
        self.most.write_text(str(self.count))


class Raiser:
    """Counts the calls of functions of torch's FSDP until the update, and raises at one of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.every = args.raise_every
        self.count = 0
        self.at = -1
        self.out = args.out

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "_fully_shard" in frame.f_code.co_filename:
            self.count += 1
            if self.count == self.at:
                sys.setprofile(None)
                with (self.out / "raised").open("a") as file:
                    file.write(f"{self.at} {frame.f_code.co_name}\n")
                raise RuntimeError(f"at call {self.at}")

    def body(self, step: Any) -> None:
        self.count, self.at = 0, -1
        turn = step.index // 2
        if step.attempt == 0 and step.index % 2 == 0 and turn > 0 and turn % dist.get_world_size() == dist.get_rank():
            self.at = turn * self.every
        sys.setprofile(self)

    def computed(self) -> None:
        sys.setprofile(None)

    def ended(self) -> None:
        (self.out / f"calls-{dist.get_rank()}").write_text(str(self.count))


def striker_of(args: argparse.Namespace) -> Striker | Raiser | None:
    if args.backend != "ftrun":
        return None
    if args.raise_every:
        return Raiser(args)
    return Striker(args) if args.kills or args.freezes else None


def main() -> None:
    args = parse()
    dist.init_process_group(args.backend)
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    net = Net(args)
    replicas = shard(net, args)
    learned = [p for p in net.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer
    if args.optim == "adamw":
        optimizer = torch.optim.AdamW(learned, lr=0.01, fused=args.fused)
    elif args.optim == "packed":
        optimizer = PackedSGD(learned, lr=0.05)
    else:
        optimizer = torch.optim.SGD(learned, lr=0.05, momentum=0.9, dampening=0.1, fused=args.fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    called = torch.compile(net) if args.compile else net
    torch.manual_seed(args.seed * 1000 + (rank // 2 if "tp" in args.layout else rank))
    random.seed(args.seed * 1000 + rank)
    np.random.seed(args.seed * 1000 + rank)
    record = Record()
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / f"rank-{rank}.log"
    ignored = ["first", "striker.after", "striker.count", "striker.at"]
    job = ftrun.protect(net, optimizer, scheduler=scheduler, record=record, replicas=replicas, ignore=ignored)
    striker = striker_of(args)
    first = True
    curve: list[float] = []  # long enough that a copy names it
    for step in job.steps(args.steps):
        x, y = indexed(args, step.index, rank // 2 if "tp" in args.layout else rank)
        with step:
            if first:
                first = False
                with log.open("a") as file:
                    file.write(json.dumps({"pid": os.getpid(), "step": step.index}) + "\n")
            if striker is not None:
                striker.body(step)
            noise = torch.rand(1) + random.random() + np.random.random()
            x = x if "tp" in args.layout else x * (1.0 + 0.05 * noise)
            record.batches.append(sha([x, y])[:12])
            updates = args.accum != "across" or step.index % 2 == 1
            halves = [(x[::2], y[::2]), (x[1::2], y[1::2])] if args.accum == "inside" else [(x, y)]
            total = 0.0
            for number, (inputs, targets) in enumerate(halves):
                if args.accum == "inside":
                    net.set_requires_gradient_sync(number == len(halves) - 1)
                loss = (called(inputs).float() - targets).square().mean()
                loss.backward()
                total += loss.item()
            record.losses.append(total)
            curve += [total * n for n in range(100)]
            if updates:
                if args.layout == "tp":
                    for param in learned:  # data parallelism by hand
                        dist.all_reduce(local(param.grad), group=replicas.get_group())
                if args.clip is not None:
                    nn.utils.clip_grad_norm_(learned, args.clip)
            if striker is not None:
                striker.computed()
            if updates:
                optimizer.step()
                if args.decay:
                    with torch.no_grad():
                        for param in learned:
                            param.mul_(0.999)
                scheduler.step()
                optimizer.zero_grad()
            if striker is not None:
                striker.ended()
    state = optimizer.state_dict()
    parts = [part for s in state["state"].values() for t in s.values() for part in parts_of(local(t))]
    result = {
        "weights": sha([local(p) for p in net.parameters()]),
        "private": None,
        "buffers": sha(list(net.buffers())),
        "optimizer": sha([*parts, sorted(state["param_groups"][0].items())]),
        "schedule": [scheduler.last_epoch, sha([curve])],
        "scaler": None,
        "rng_python": sha([random.getstate()]),
        "rng_numpy": sha([part.tobytes() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]),
        "rng_torch": sha([torch.get_rng_state()]),
        "batches": record.batches,
        "losses": record.losses,
        "pid": os.getpid(),
        "history": [json.loads(line) for line in log.read_text().splitlines()],
    }
    target = args.out / f"rank-{rank}.json"
    target.with_suffix(".tmp").write_text(json.dumps(result))
    os.replace(target.with_suffix(".tmp"), target)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
