"""Loader workers that live on, whose start method the script chooses, and a data set that the script itself defines."""

import os

import torch
from both_ways import WIDTH, begin, end, loss_of, protect, small, strike
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Rows(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.mean(0, keepdim=True)


def main() -> None:
    multiprocessing.set_start_method(os.environ["CASE_METHOD"])
    rank = begin()
    data = Rows()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1, persistent_workers=True)
    model = DDP(small(nn.Dropout(0.3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    job = protect(model, optimizer)
    torch.manual_seed(rank)
    for epoch in job.epochs(4):
        sampler.set_epoch(epoch)
        for step, (x, y) in job.batches(loader):
            with step:
                strike(rank, epoch, step.index)
                loss_of(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    end(rank, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
