"""A loop without an end of its own: a rate set by hand, micro-batches, the next batch fetched ahead, all in global variables."""

import contextlib

import torch
import torch.distributed as dist
from common import finish, net, reach
from torch.nn.parallel import DistributedDataParallel as DDP

import ftrun

STEPS, MICRO = 24, 2
dist.init_process_group("ftrun")
model = DDP(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank())


def fetch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 8), torch.randint(0, 4, (8,))


number, lowest = 0, 1e9
x, y = fetch()
job = ftrun.protect(model, optimizer)
for step in job.steps(STEPS):
    with step:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 - number / STEPS)
        for micro in range(MICRO):
            with contextlib.nullcontext() if micro == MICRO - 1 else model.no_sync():
                loss = torch.nn.functional.cross_entropy(model(x), y) / MICRO
                x, y = fetch()
                reach(f"step-{number}")
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        lowest = min(lowest, loss.item())
        number += 1
        optimizer.step()
        optimizer.zero_grad()
        if number == STEPS:
            break
finish(model, optimizer, lowest=lowest)
