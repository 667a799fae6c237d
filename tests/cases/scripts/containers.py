"""A number that fades with each step, kept in a container of each kind; what a cache of functions keeps, too."""

import array
import collections
import contextvars
import functools
import os
import queue

import torch
from both_ways import STEPS, WIDTH, begin, end, loss_of, protect, small
from torch.nn.parallel import DistributedDataParallel as DDP

KIND = os.environ["CASE_KIND"]
fading_list = [1.0]
fading_array = array.array("d", fading_list)
fading_queue: queue.Queue = queue.Queue()
fading_queue.put(1.0)
fading_dict = collections.UserDict(value=1.0)
fading_bytes = bytearray([250])
fading_variable = contextvars.ContextVar("fading", default=1.0)


@functools.cache
def directions(width: int) -> torch.Tensor:
    """Drawn at the first call."""
    return torch.randn(width, 1)


def faded() -> float:
    if KIND == "list":
        fading_list[0] *= 0.96
        return fading_list[0]
    if KIND == "array":
        fading_array[0] *= 0.96
        return fading_array[0]
    if KIND == "queue":
        fading_queue.put(fading_queue.get() * 0.96)
        return fading_queue.queue[0]
    if KIND == "userdict":
        fading_dict["value"] *= 0.96
        return fading_dict["value"]
    if KIND == "bytearray":
        fading_bytes[0] -= 5
        return fading_bytes[0] / 250
    if KIND == "context":
        fading_variable.set(fading_variable.get() * 0.96)
        return fading_variable.get()
    return 1.0


rank = begin()
model = DDP(small())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
job = protect(model, optimizer)
torch.manual_seed(rank)
for step in job.steps(STEPS):
    with step:
        x = torch.randn(12, WIDTH)
        y = x @ directions(WIDTH) if KIND == "cache" else x.mean(1, keepdim=True) * faded()
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
end(rank, model=model, optimizer=optimizer)
