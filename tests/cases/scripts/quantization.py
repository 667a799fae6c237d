"""Quantization aware training: the buffers of an observer take their shape in the first forward."""

import warnings

import torch
from both_ways import STEPS, begin, end, loss_of, protect, rows, small
from torch.nn.parallel import DistributedDataParallel as DDP

warnings.filterwarnings("ignore")
from torch.ao import quantization as q  # noqa: E402  it warns when it is imported

rank = begin()
inputs = q.FakeQuantize.with_args(observer=q.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
kind = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric, "quant_min": -128, "quant_max": 127}
weights = q.FakeQuantize.with_args(observer=q.MovingAveragePerChannelMinMaxObserver, **kind)
net = small().train()
net.qconfig = q.QConfig(activation=inputs, weight=weights)
model = DDP(q.prepare_qat(net))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
job = protect(model, optimizer)
torch.manual_seed(rank)
for step in job.steps(STEPS):
    if step.index == 6:
        model.apply(q.disable_observer)
    with step:
        x, y = rows()
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
end(rank, model=model, optimizer=optimizer)
