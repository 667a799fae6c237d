"""An average of the weights is copied into the model for a validation, and the weights are put back behind it."""

import torch
import torch.distributed as dist
from both_ways import STEPS, WIDTH, begin, end, loss_of, protect, rows, small
from torch.nn.parallel import DistributedDataParallel as DDP


class Average:
    def __init__(self, parameters) -> None:
        self.live = list(parameters)
        self.mean = [p.detach().clone() for p in self.live]

    @torch.no_grad()
    def update(self) -> None:
        for mean, p in zip(self.mean, self.live, strict=True):
            mean.lerp_(p, 0.2)

    @torch.no_grad()
    def swapped(self, measure) -> float:
        weights = [p.detach().clone() for p in self.live]
        for p, mean in zip(self.live, self.mean, strict=True):
            p.data.copy_(mean)
        found = measure()
        for p, kept in zip(self.live, weights, strict=True):
            p.data.copy_(kept)
        return found

    def state_dict(self) -> dict:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict) -> None:
        self.mean = [t.clone() for t in state["mean"]]


rank = begin()
model = DDP(small())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
average = Average(model.parameters())
held_out = torch.randn(20, WIDTH)
job = protect(model, optimizer, average)
torch.manual_seed(rank)


def measure() -> float:
    found = loss_of(model.module(held_out), held_out.mean(1, keepdim=True))
    dist.all_reduce(found)
    return found.item()


def validate() -> float:
    return average.swapped(measure)


for step in job.steps(STEPS):
    if step.index % 6 == 5:
        print(job.call(validate))
    with step:
        x, y = rows()
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
end(rank, model=model, average=average, optimizer=optimizer)
