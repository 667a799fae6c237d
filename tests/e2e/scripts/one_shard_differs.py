"""HSDP over four ranks. In the run called NAME, `--flaw` RANK has another gradient of one weight's shard in step 3 than it has computed."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ftrun

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("--flaw", type=int, required=True)
arguments = parser.parse_args()

dist.init_process_group("ftrun")
torch.manual_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(8, 13), torch.nn.ReLU(), torch.nn.Linear(13, 3))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(100 + dist.get_rank())
job = ftrun.protect(model, optimizer)
for step in job.steps(6):
    with step:
        model(torch.randn(4, 8)).square().mean().backward()
        if arguments.name == "faults" and step.index == 3 and dist.get_rank() == arguments.flaw:
            model[0].weight.grad.to_local().add_(1.0)
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
