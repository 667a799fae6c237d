"""A loop of Hugging Face's accelerate: a prepared model, loaders that it shards, gathered metrics."""

import os

import torch
from accelerate import Accelerator
from common import finish, net, reach, samples
from torch.utils.data import DataLoader

import ftrun

torch.distributed.init_process_group("ftrun")
accelerator = Accelerator(cpu=True, rng_types=[])
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
train_loader = DataLoader(samples(160, 1), batch_size=4, shuffle=True)
test_loader = DataLoader(samples(64, 2), batch_size=8)
model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, test_loader, scheduler
)
best = 0.0


def evaluate(epoch: int) -> float:
    model.eval()
    right = count = 0
    for x, y in test_loader:
        with torch.no_grad():
            answers = model(x).argmax(-1)
        reach(f"evaluation-{epoch}")
        answers, y = accelerator.gather_for_metrics((answers, y))
        right += (answers == y).sum().item()
        count += len(y)
    return right / count


job = ftrun.protect(model, optimizer, scheduler)
for epoch in job.epochs(int(os.environ["EPOCHS"])):
    model.train()
    for step, (x, y) in job.batches(train_loader):
        with step, accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            reach(f"epoch-{epoch}")
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    best = max(best, job.call(evaluate, epoch))
finish(accelerator.unwrap_model(model), optimizer.optimizer, best=best)
