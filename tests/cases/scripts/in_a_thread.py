"""Training runs in a thread, and the main thread does something else, as a program with a window or a server has it."""

import threading

import torch
from both_ways import STEPS, begin, end, loss_of, protect, rows, small
from torch.nn.parallel import DistributedDataParallel as DDP


def train() -> None:
    rank = begin()
    model = DDP(small())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    job = protect(model, optimizer)
    torch.manual_seed(rank)
    for step in job.steps(STEPS):
        with step:
            x, y = rows()
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    end(rank, model=model, optimizer=optimizer)


thread = threading.Thread(target=train)
thread.start()
while thread.is_alive():
    thread.join(0.02)
