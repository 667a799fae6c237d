"""What a page's Python block takes for granted: a model, an optimizer, data, an evaluation. Each block runs after these lines."""

import os  # noqa: F401

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftrun  # noqa: F401

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
dataset = torch.randn(64, 8)
"""above: no rank is needed"""
dist.init_process_group("ftrun")
ddp = DistributedDataParallel(model)
sampler = torch.utils.data.DistributedSampler(dataset, seed=1)
loader = train_loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)


def batch_for(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 1009 + dist.get_rank()))


def evaluate(*_: object) -> float:
    with torch.no_grad():
        error = model(dataset).square().mean()
    dist.all_reduce(error)
    return error.item()
