"""The best score of all epochs is a local variable; an epoch that beats it would write a checkpoint."""

import torch
import torch.distributed as dist
from both_ways import begin, end, loss_of, protect, small, strike
from torch.nn.parallel import DistributedDataParallel as DDP


def score(epoch: int) -> float:
    found = torch.tensor([0.4, 0.9, 0.3, 0.5][epoch])
    dist.all_reduce(found)
    return found.item()


def train() -> None:
    rank = begin()
    model = DDP(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    best, improved = 0.0, []
    job = protect(model, optimizer)
    for epoch in job.epochs(4):
        inputs = [torch.full((6, 6), 0.1 * number + rank) for number in range(4)]
        for step, x in job.batches(inputs):
            with step:
                strike(rank, epoch, step.index)
                loss_of(model(x), x.mean(1, keepdim=True)).backward()
                optimizer.step()
                optimizer.zero_grad()
        new = job.call(score, epoch)
        if new > best:
            best = new
            improved.append(epoch)
    end(rank, model=model, best=best, improved=improved)


train()
