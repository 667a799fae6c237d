"""An epoch is cut off after four batches; a bar is wrapped around the loader and `enumerate` around the job; nobody calls set_epoch."""

import sys

import torch
from both_ways import WIDTH, begin, end, loss_of, protect, small, strike
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


class Dots:
    """Prints a dot for every batch that passes."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            print(".", end="", file=sys.stderr)
            yield batch


rank = begin()
x = torch.randn(80, WIDTH)
data = TensorDataset(x, x.mean(1, keepdim=True))
loader = DataLoader(
    data, batch_size=10, shuffle=True, num_workers=1, generator=torch.Generator().manual_seed(40 + rank)
)
model = DDP(small())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
job = protect(model, optimizer)
torch.manual_seed(rank)
for epoch in job.epochs(4):
    for number, (step, (x, y)) in enumerate(job.batches(Dots(loader))):
        with step:
            strike(rank, epoch, step.index)
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if number == 3:
            break
end(rank, model=model, optimizer=optimizer)
