"""A loss term is annealed by the number that `enumerate` counts, as VAE examples do with their KL term."""

import torch
from both_ways import STEPS, WIDTH, begin, end, protect
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Auto(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 4), nn.Linear(2, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, spread = self.encode(x).chunk(2, dim=1)
        penalty = (mean.square() + spread.exp() - spread).mean()
        return self.decode(mean + spread.exp() * torch.randn_like(mean)), penalty


rank = begin()
model = DDP(Auto())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
job = protect(model, optimizer)
torch.manual_seed(rank)
for number, step in enumerate(job.steps(STEPS)):
    with step:
        x = torch.randn(8, WIDTH)
        again, penalty = model(x)
        loss = (again - x).square().mean() + min(1.0, number / 15) * penalty
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
end(rank, model=model, optimizer=optimizer)
