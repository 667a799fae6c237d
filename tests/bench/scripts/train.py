"""The measured script: the GPT of examples/train_gpt.py, 10.6 M parameters with fused AdamW, each finished step timed.

One row of 16 bytes a rank and step: a stall is mostly the redone step, and this one is short (0.14 s on two cores).
`--fill S` makes a step at least S seconds long: the rank multiplies matrices until then.

Every rank appends to OUT/rank-R.times: "begin PID NS" when the script starts, "done STEP NS PID CPU" after each step (NS on
CLOCK_MONOTONIC, the same for all processes; CPU: ns of processor time of the process). `--system torchrun` is stock torch
with a checkpoint every --checkpoint-every steps (0: none). `--order late` is the order of torchrun's tutorial: LOCAL_RANK is
read first, then everything is built. While OUT/hold is there the script waits at its end. `--layout fsdp2` and `hsdp` (two replicas):
each block is sharded for itself, the rest with the root; no checkpoint is written then.
"""

from __future__ import annotations

import time

BEGIN = time.monotonic_ns()

import argparse  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import train_gpt  # noqa: E402

CONTEXT = 16
SIZES = {**train_gpt.SIZES, "1m": (4, 144, 6, 64)}  # of these a million are parameters

sys.path.insert(0, str(Path(__file__).resolve().parent))

from start_noop import hold  # noqa: E402


def build(args: argparse.Namespace) -> tuple[train_gpt.GPT, torch.optim.Optimizer]:
    torch.manual_seed(args.seed)
    model = train_gpt.GPT(*SIZES[args.size])
    return model, optimizer_of(model)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def shard(model: train_gpt.GPT, layout: str) -> None:
    """Lay the model over the ranks."""
    ranks = dist.get_world_size()
    mesh = (
        init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
        if layout == "fsdp2"
        else init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    )
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=["ftrun", "torchrun"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--order", choices=["early", "late"], default="early")
    parser.add_argument("--size", choices=SIZES, default="10m")
    parser.add_argument("--layout", choices=["ddp", "fsdp2", "hsdp"], default="ddp")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=CONTEXT, help="bytes in a row")
    parser.add_argument("--fill", type=float, default=0.0, metavar="S", help="shortest time of a step")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="under torchrun; 0: never")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ballast", type=int, default=0, help="MB of memory that each rank touches and keeps")
    args = parser.parse_args()
    if args.layout != "ddp" and args.system == "torchrun" and args.checkpoint_every:
        parser.error("rank 0 has not all of a sharded model: --checkpoint-every 0")
    backend = "ftrun" if args.system == "ftrun" else "gloo"
    if args.order == "early":
        model, optimizer = build(args)
        text = train_gpt.Text(args.seed)
        dist.init_process_group(backend)
    else:
        assert os.environ["LOCAL_RANK"]
        dist.init_process_group(backend)
        model, optimizer = build(args)
        text = train_gpt.Text(args.seed)
    rank = dist.get_rank()
    times = os.open(args.out / f"rank-{rank}.times", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(times, f"begin {os.getpid()} {BEGIN}\n".encode())
    ballast, filler = torch.ones(args.ballast, 1 << 18), torch.ones(256, 256)
    torch.manual_seed(args.seed * 1000 + rank)
    net: torch.nn.Module = model
    if args.layout == "ddp":
        net = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        shard(model, args.layout)
        optimizer = optimizer_of(model)

    checkpoint = args.out / "checkpoint.pt"
    steps: Any
    if args.system == "ftrun":
        import ftrun

        job = ftrun.protect(model=net, optimizer=optimizer)
        steps = ((step, step.index) for step in job.steps(args.steps))
    else:
        start = 0
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            start = saved["step"]
        steps = ((nullcontext(), index) for index in range(start, args.steps))

    for step, index in steps:
        with step:
            filled = time.monotonic() + args.fill
            inputs, targets = text.batch("train", index, rank, args.batch, args.context)
            loss = net(inputs, targets)
            while time.monotonic() < filled:
                torch.mm(filler, filler)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if args.system == "torchrun" or step.committed:
            os.write(times, f"done {index} {time.monotonic_ns()} {os.getpid()} {time.process_time_ns()}\n".encode())
        checkpoints = args.system == "torchrun" and rank == 0 and args.checkpoint_every
        if checkpoints and (index + 1) % args.checkpoint_every == 0:
            whole = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": index + 1}
            torch.save(whole, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
    del ballast
    hold(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
