"""A model that writes a checkpoint every four steps and goes on from one that it finds.

checkpointed.py BACKEND LAYOUT OUT STEPS KILLS. LAYOUT: fsdp, hsdp, ddp, or stages (a pipeline). KILLS: words "where:step:rank", where
is forward, update, saving (after this rank has written its part) or ending (before it writes one after the loop, if it has one alone).
Each rank writes OUT/digest-R.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import ftrun


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main() -> None:
    backend, layout, out, steps, kills = *sys.argv[1:3], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5].split()
    out.mkdir(parents=True, exist_ok=True)
    last = out / "last"
    dist.init_process_group(backend)
    rank = dist.get_rank()

    def strike(where: str, step: int) -> None:
        mark = out / f"struck-{where}-{step}"
        if f"{where}:{step}:{rank}" in kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(rank if layout == "stages" else 1)
    last_width = 33 if layout == "stages" else 13
    model: nn.Module = nn.Sequential(nn.Linear(33, 47), nn.ReLU(), nn.Linear(47, last_width))
    schedule = None
    if layout == "stages":
        example = torch.zeros(4, 33, requires_grad=True)
        stage = PipelineStage(model, rank, 4, torch.device("cpu"), input_args=(example,), output_args=(example,))
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda output, _: output.square().mean())
    elif layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        shape = (dist.get_world_size(),) if layout == "fsdp" else (2, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    job = ftrun.protect(model, optimizer, scheduler)
    if last.exists():
        job.load(last)
    for step in job.steps(steps):
        with step:
            torch.manual_seed(step.index * 10 + rank)
            x = torch.randn(8, 33)
            if schedule is None:
                loss = model(x).square().mean()
                strike("forward", step.index)
                loss.backward()
            else:
                strike("forward", step.index)
                schedule.step(*[x] * (rank == 0), target=x if rank == 3 else None)
            optimizer.step()
            strike("update", step.index)
            scheduler.step()
            optimizer.zero_grad()
        if step.committed and (step.index + 1) % 4 == 0 and (layout != "ddp" or rank == 0):
            job.save(last, step.index + 1)
            strike("saving", step.index)
    blobs = [local(p).detach().numpy().tobytes() for p in model.parameters()]
    for param in model.parameters():
        blobs += [local(value).numpy().tobytes() for _, value in sorted(optimizer.state[param].items())]
    blobs.append(repr(scheduler.state_dict()).encode())
    (out / f"digest-{rank}").write_text(hashlib.sha256(b"".join(blobs)).hexdigest())
    dist.barrier()
    if layout != "ddp":
        strike("ending", steps)
        job.save(out / "end", steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
