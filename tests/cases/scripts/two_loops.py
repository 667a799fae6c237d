"""Two tasks in turns: in each epoch all batches of the one, then all of the other; two heads on one trunk."""

import torch
from both_ways import WIDTH, begin, end, loss_of, protect, strike
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

rank = begin()
x = torch.randn(80, WIDTH)
data = TensorDataset(x, x.mean(1, keepdim=True))
trunk = nn.Linear(WIDTH, 10)
first, second = (DDP(nn.Sequential(trunk, nn.Tanh(), nn.Linear(10, width))) for width in (1, 2))
every = {id(p): p for model in (first, second) for p in model.parameters()}
optimizer = torch.optim.Adam(every.values(), lr=0.01)
samplers = [DistributedSampler(data, seed=seed) for seed in (0, 9)]
loaders = [DataLoader(data, batch_size=10, sampler=sampler) for sampler in samplers]
job = protect([first, second], optimizer)
torch.manual_seed(rank)
for epoch in job.epochs(3):
    for sampler in samplers:
        sampler.set_epoch(epoch)
    for step, (x, y) in job.batches(loaders[0]):
        with step:
            strike(rank, epoch, step.index)
            loss_of(first(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    for step, (x, y) in job.batches(loaders[1]):
        with step:
            nn.functional.cross_entropy(second(x), (y[:, 0] > 0).long()).backward()
            optimizer.step()
            optimizer.zero_grad()
end(rank, first=first, second=second, optimizer=optimizer)
