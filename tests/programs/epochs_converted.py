"""Epochs with a sampler, an evaluation on all ranks, the best accuracy so far, and a checkpoint from which it goes on."""

import os

import torch
import torch.distributed as dist
from common import finish, load, loaders, net, reach, save
from torch.nn.parallel import DistributedDataParallel as DDP

import ftrun

dist.init_process_group("ftrun")
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
train_loader, test_loader = loaders()
first, best = 0, 0.0
saved = load()
if saved:
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    first, best = saved["epoch"], saved["best"]
torch.manual_seed(100 * first + dist.get_rank())


def evaluate(epoch: int) -> float:
    model.eval()
    found = torch.zeros(2)
    with torch.no_grad():
        for x, y in test_loader:
            found += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
            reach(f"evaluation-{epoch}")
    dist.all_reduce(found)
    reach(f"reduced-{epoch}")
    return (found[0] / found[1]).item()


job = ftrun.protect(model, optimizer, scheduler)
for epoch in job.epochs(int(os.environ["EPOCHS"]), start=first):
    train_loader.sampler.set_epoch(epoch)
    model.train()
    for step, (x, y) in job.batches(train_loader):
        with step:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            reach(f"epoch-{epoch}")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    accuracy = job.call(evaluate, epoch)
    scheduler.step()
    best = max(best, accuracy)
    if dist.get_rank() == 0:
        reach(f"before-{epoch}")
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "best": best}
        save({**state, "scheduler": scheduler.state_dict(), "epoch": epoch + 1})
        reach(f"saved-{epoch}")
finish(model, optimizer, best=best)
