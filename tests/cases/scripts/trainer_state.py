"""A Trainer that keeps what job.state() gave as an attribute, and counts in plain attributes beside it."""

import torch
from both_ways import STEPS, begin, end, loss_of, protect, rows, small
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self) -> None:
        self.rank = begin()
        self.model = DDP(small())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.rows, self.history = 0, []
        self.job = protect(self.model, self.optimizer)
        self.kept = self.job.state(calls=0)
        torch.manual_seed(self.rank)

    def fit(self) -> None:
        for step in self.job.steps(STEPS):
            with step:
                x, y = rows()
                loss = loss_of(self.model(x), y)
                loss.backward()
                self.kept.calls += 1
                self.rows += len(x)
                self.history.append(loss.item())
                self.optimizer.step()
                self.optimizer.zero_grad()
        end(self.rank, model=self.model, calls=self.kept.calls, rows=self.rows, history=self.history)


Trainer().fit()
