"""A model that writes a checkpoint every four steps and goes on from one that it finds.

checkpointed.py BACKEND LAYOUT OUT STEPS KILLS. LAYOUT: fsdp, hsdp, tp (and FSDP2), ddp, or stages (a pipeline). KILLS: words
"where:step:rank", where is forward, again (the same, once a rank has died in an update), update,
saving (after this rank has written its part), ending (before it writes one after the loop, if it has one alone), or in a save: tensors,
 describing (behind them), merging (all ranks' descriptions). Each rank writes
OUT/digest-R, and of DTensors rank 0 OUT/full-RANKS-STEPS.pt.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ftrun
from ftrun.worker.process import checkpoints


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main() -> None:
    backend, layout, out, steps, kills = *sys.argv[1:3], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5].split()
    out.mkdir(parents=True, exist_ok=True)
    last = out / "last"
    dist.init_process_group(backend)
    rank = dist.get_rank()

    def strike(where: str, step: int) -> None:
        mark = out / f"struck-{where}-{step}-{rank}"
        if f"{where}:{step}:{rank}" in kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    at = 0

    def dying(where: str, call: Callable[..., Any], if_file: str = "") -> Callable[..., Any]:
        def wrapped(one: Any, *args: Any, **kwargs: Any) -> Any:
            if not if_file or one.name == if_file:
                strike(where, at)
            return call(one, *args, **kwargs)

        return wrapped

    FileSystemWriter.write_data = dying("tensors", FileSystemWriter.write_data)  # type: ignore[method-assign]
    FileSystemWriter.finish = dying("describing", FileSystemWriter.finish)  # type: ignore[method-assign]
    checkpoints.whole = dying("merging", checkpoints.whole, ".metadata")
    torch.manual_seed(rank if layout == "stages" else 1)
    last_width = 33 if layout == "stages" else 13
    model: nn.Module = nn.Sequential(nn.Linear(33, 46), nn.ReLU(), nn.Linear(46, last_width))
    schedule = None
    if layout == "stages":
        example = torch.zeros(4, 33, requires_grad=True)
        stage = PipelineStage(model, rank, 4, torch.device("cpu"), input_args=(example,), output_args=(example,))
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda output, _: output.square().mean())
    elif layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        shape = (dist.get_world_size(),) if layout == "fsdp" else (2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        if layout == "tp":
            parallelize_module(model, mesh["shard"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["replicate"] if layout == "tp" else mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    job = ftrun.protect(model, optimizer, scheduler, ignore=["at"])
    kept = job.state(mine=rank)
    if last.exists():
        job.load(last)
        print(f"rank {rank} begins at step {job.start_step}, its own is {kept.mine}", flush=True)
    for step in job.steps(steps):
        with step:
            torch.manual_seed(step.index * 10 + rank)
            x = torch.randn(8, 33)
            if schedule is None:
                loss = model(x).square().mean()
                strike("forward", step.index)
                if list(out.glob("struck-update-*")):
                    strike("again", step.index)
                loss.backward()
            else:
                strike("forward", step.index)
                schedule.step(*[x] * (rank == 0), target=x if rank == 3 else None)
            optimizer.step()
            strike("update", step.index)
            scheduler.step()
            optimizer.zero_grad()
        at = step.index
        if step.committed and (step.index + 1) % 4 == 0 and (layout != "ddp" or rank == 0):
            job.save(last, step.index + 1)
            strike("saving", step.index)
    blobs = [local(p).detach().numpy().tobytes() for p in model.parameters()]
    for param in model.parameters():
        blobs += [local(value).numpy().tobytes() for _, value in sorted(optimizer.state[param].items())]
    blobs.append(repr(scheduler.state_dict()).encode())
    (out / f"digest-{rank}").write_text(hashlib.sha256(b"".join(blobs)).hexdigest())
    values = dict(model.state_dict().items())
    values |= {f"{i} {name}": one for i, state in optimizer.state_dict()["state"].items() for name, one in state.items()}
    if layout not in ("ddp", "stages"):
        whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in values.items()}
        if rank == 0:
            torch.save(whole, out / f"full-{dist.get_world_size()}-{steps}.pt")
    dist.barrier()
    if layout != "ddp":
        strike("ending", steps)
        job.save(out / "end", steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
