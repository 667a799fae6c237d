"""A stream of data whose loader workers live on: a shared number tells them the epoch; each takes a share by rank and worker."""

import multiprocessing

import torch
from both_ways import WIDTH, begin, end, loss_of, protect, small, strike
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, rank: int) -> None:
        self.rank, self.epoch = rank, multiprocessing.Value("l", 0)

    def __len__(self) -> int:
        return 64

    def __iter__(self):
        worker = get_worker_info()
        order = torch.randperm(128, generator=torch.Generator().manual_seed(300 + self.epoch.value)).tolist()
        for index in order[2 * self.rank + worker.id :: 4]:
            x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
            yield x, x.mean(0, keepdim=True)


rank = begin()
stream = Stream(rank)
loader = DataLoader(stream, batch_size=8, num_workers=2, persistent_workers=True)
model = DDP(small())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
job = protect(model, optimizer)
torch.manual_seed(rank)
for epoch in job.epochs(3):
    stream.epoch.value = epoch
    for step, (x, y) in job.batches(loader):
        with step:
            strike(rank, epoch, step.index)
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
end(rank, model=model, optimizer=optimizer)
