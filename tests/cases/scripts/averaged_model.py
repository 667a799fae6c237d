"""torch's AveragedModel, given to protect() by name and updated behind optimizer.step()."""

import torch
from both_ways import STEPS, begin, end, loss_of, protect, rows, small
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

rank = begin()
net = small()
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
job = protect(model, optimizer, average=average)
torch.manual_seed(rank)
for step in job.steps(STEPS):
    with step:
        x, y = rows()
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)
end(rank, model=model, average=average)
