"""A class that trains: meters in a defaultdict, set back in each epoch, a history, a counter of epochs without progress."""

import collections
import time

import numpy as np
import torch
from both_ways import begin, end, loss_of, protect, rows, small
from torch.nn.parallel import DistributedDataParallel as DDP

EPOCHS, LENGTH = 3, 8


class Meter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.total, self.count = self.total + value, self.count + 1


class Patience:
    best = float("inf")

    def __init__(self):
        self.bad = 0

    def over(self, value):
        if value < self.best:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad > 5


class Timer:
    def __enter__(self):
        self.began = time.perf_counter()
        return self

    def __exit__(self, *_):
        self.took = time.perf_counter() - self.began


class Trainer:
    def __init__(self, rank):
        self.model = DDP(small())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, EPOCHS * LENGTH)
        self.meters, self.history, self.steps, self.last = collections.defaultdict(Meter), [], 0, None
        self.patience, self.noise = Patience(), np.random.default_rng(rank)
        self.job = protect(self.model, self.optimizer, self.schedule)

    def fit(self):
        for epoch in self.job.epochs(EPOCHS):
            for meter in self.meters.values():
                meter.reset()
            for step in self.job.steps(LENGTH):
                with step, Timer():
                    x, y = rows()
                    part = float(self.noise.beta(0.4, 0.4))
                    loss = loss_of(self.model(part * x + (1 - part) * x.flip(0)), y)
                    loss.backward()
                    self.meters["loss"].update(loss.item())
                    self.meters["part"].update(part)
                    self.steps += 1
                    self.last = loss
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
            mean = self.meters["loss"].total / self.meters["loss"].count
            self.history.append((epoch, mean, {name: meter.total for name, meter in self.meters.items()}))
            self.stopped = self.patience.over(mean)


rank = begin()
trainer = Trainer(rank)
torch.manual_seed(rank)
trainer.fit()
state = (trainer.steps, trainer.patience.best, trainer.patience.bad, trainer.stopped, trainer.last.item())
end(rank, model=trainer.model, optimizer=trainer.optimizer, history=trainer.history, state=state)
