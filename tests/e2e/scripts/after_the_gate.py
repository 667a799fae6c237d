"""FSDP2 with something beside the update behind the gate, `--mode`: what a replacement could not do in a dead rank's place."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ftrun

WIDTH, STEPS = 128, 14


class Scaled(torch.optim.SGD):
    def step(self, scale: Any = 1.0) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(param.grad, alpha=-group["lr"] * scale)


parser = argparse.ArgumentParser()
parser.add_argument("--mode", required=True)
mode = parser.parse_args().mode
dist.init_process_group("ftrun")
rank = dist.get_rank()
torch.manual_seed(5)
model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)])
for part in (*model, model):
    fully_shard(part)
kind = Scaled if mode == "argument" else torch.optim.AdamW
optimizer = kind(model.parameters(), lr=0.01)
if mode == "hook of all":
    register_optimizer_step_pre_hook(lambda *_: halve())
job = ftrun.protect(model, optimizer)


def halve(*_: Any) -> None:
    for param in model.parameters():
        param.grad.to_local().mul_(0.5)


if mode == "hook":
    optimizer.register_step_pre_hook(halve)
for step in job.steps(STEPS):
    with step:
        draw = torch.Generator().manual_seed(1000 * rank + step.index)
        model(torch.randn(8, WIDTH, generator=draw)).square().mean().backward()
        optimizer.step(0.5) if mode == "argument" else optimizer.step()
        if mode == "data" and step.index == 9:  # in a step whose parameters other checks do not read whole
            for param in model.parameters():
                param.to_local().data.mul_(0.9)
        if mode == "cleared" and step.index == 4:
            optimizer.state.clear()
        optimizer.zero_grad(set_to_none=mode != "zeros")
