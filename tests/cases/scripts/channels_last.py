"""A convolution in channels_last, a weight that is a transposed view, a buffer with strides of its own, and one that is None."""

import torch
from both_ways import STEPS, begin, end, protect
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank = begin()
body = [nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 1), nn.AdaptiveMaxPool2d(1), nn.Flatten()]
net = nn.Sequential(*body, nn.Linear(6, 3))
net[-1].weight = nn.Parameter(torch.randn(6, 3).t())
net = net.to(memory_format=torch.channels_last)
net.register_buffer("fading", torch.ones(5, 2).t(), persistent=False)
net.register_buffer("absent", None)
model = DDP(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
job = protect(model, optimizer)
torch.manual_seed(rank)
for step in job.steps(STEPS):
    with step:
        images = torch.randn(3, 2, 7, 7).to(memory_format=torch.channels_last)
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        net.fading.mul_(0.98)
strides = [t.stride() for t in (net[0].weight, net[-1].weight, net.fading)]
end(rank, model=model, optimizer=optimizer, fading=net.fading, strides=strides)
