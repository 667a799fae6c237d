"""A sampler that counts how often it was iterated, and orders the data by that; nobody calls set_epoch."""

import torch
from both_ways import WIDTH, begin, end, loss_of, protect, small, strike
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Turns(Sampler):
    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank, self.turn = size, rank, 0

    def __len__(self) -> int:
        return self.size // 2

    def __iter__(self):
        self.turn += 1
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(90 * self.turn))
        return iter(order[self.rank :: 2].tolist())


rank = begin()
x = torch.randn(80, WIDTH)
loader = DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), batch_size=8, sampler=Turns(80, rank))
model = DDP(small())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
job = protect(model, optimizer)
torch.manual_seed(rank)
for epoch in job.epochs(5):
    for step, (x, y) in job.batches(loader):
        with step:
            strike(rank, epoch, step.index)
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
end(rank, model=model, optimizer=optimizer)
