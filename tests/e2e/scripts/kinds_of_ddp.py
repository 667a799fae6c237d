"""Trains in ways that few scripts do, the same under ftrun and torchrun; each rank writes digests of all it has.

kinds_of_ddp.py --case subgroups|in-turns|sparse|unfrozen|hook|compiled|compiled-inside|stock-group --backend ftrun|gloo --out FOLDER
"""

import argparse
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ftrun

STEPS = 10


class Net(nn.Module):
    """Used in another order than defined, so that DDP's rebuilt buckets differ from the first."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(40, 5), nn.Linear(40, 40), nn.Linear(24, 40)
        self.table = nn.Embedding(50, 24, sparse=sparse)
        self.shift = nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.table((x[:, 0].abs() * 20).long().clamp(0, 49))
        return self.last(self.middle(self.first(x).relu()).tanh()) + self.shift


def sha(parts: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.detach().numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode())
    return digest.hexdigest()


def half_precision(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    small = bucket.buffer().half().div_(dist.get_world_size())
    dist.all_reduce(small, group=group)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer().copy_(small))
    return done


def dies_now(out: Path, rank: int) -> bool:
    """The first time only."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        (out / f"died-{rank}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--case",
        choices=["subgroups", "in-turns", "sparse", "unfrozen", "hook", "compiled", "compiled-inside", "stock-group"],
        required=True,
    )
    parser.add_argument("--backend", required=True)
    parser.add_argument(
        "--linger",
        type=int,
        default=-1,
        help="rank 2 waits before this step, and the first pair dies in the one before",
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])] if args.case == "subgroups" else []
    torch.manual_seed(3)
    nets = [Net(args.case == "sparse") for _ in range(2 if args.case == "in-turns" else 1)]
    for net in nets:
        net.shift.requires_grad_(args.case != "unfrozen")
    group = pairs[rank // 2] if pairs else None
    if args.case == "stock-group":
        group = dist.new_group(backend="gloo")
    cap = None if args.case.startswith("compiled") else 0.004  # torch compiles no module with a small one
    inside = [
        torch.compile(net, backend="eager", fullgraph=True) if args.case == "compiled-inside" else net for net in nets
    ]
    ddps = [DistributedDataParallel(net, bucket_cap_mb=cap, process_group=group) for net in inside]
    momentum = 0.0 if args.case == "sparse" else 0.9
    if args.case == "compiled":
        called = [torch.compile(ddp, backend="eager") for ddp in ddps]
    else:
        called = ddps
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum) for net in nets]
    job = ftrun.protect(model=ddps, optimizer=optimizers)
    torch.manual_seed(rank)
    random.seed(rank)
    for net in nets:
        net.shift.requires_grad_()  # DDP leaves it alone where it was frozen before: a rank's own
    if args.case == "hook":
        ddps[0].register_comm_hook(dist.group.WORLD, half_precision)
    for step in job.steps(STEPS):
        if rank == 2 and step.index == args.linger:
            time.sleep(2.0)
        with step:
            turn = step.index % len(ddps)
            loss = called[turn](torch.randn(6, 24) + random.random()).square().mean()
            loss.backward()
            optimizers[turn].step()
            if rank < 2 and step.index == args.linger - 1 and dies_now(args.out, rank):
                time.sleep(0.5)  # rank 2 has its next step by now
                os.kill(os.getpid(), signal.SIGKILL)
            optimizers[turn].zero_grad()
    momenta = [
        s["momentum_buffer"] for o in optimizers for s in o.state.values() if s.get("momentum_buffer") is not None
    ]
    result = {
        "weights": sha(p for net in nets for p in net.parameters()),
        "optimizer": sha(momenta),
        "rng": sha([torch.get_rng_state(), random.getstate()]),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / f"rank-{rank}.json"
    target.with_suffix(".tmp").write_text(json.dumps(result))
    os.replace(target.with_suffix(".tmp"), target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    time.sleep(0.1)  # a Gloo thread of plain torch that gives up a tensor while the interpreter ends aborts the process
