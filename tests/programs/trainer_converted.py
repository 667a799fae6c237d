"""A Trainer class that runs epochs, writes snapshots, and goes on from the one that it finds."""

import os

import torch
import torch.distributed as dist
from common import finish, load, loaders, net, reach, save
from torch.nn.parallel import DistributedDataParallel as DDP

import ftrun


class Trainer:
    def __init__(self) -> None:
        self.train_loader, self.test_loader = loaders()
        model = net()
        self.first = 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self._load_snapshot(model)
        self.model = DDP(model)
        self.job = ftrun.protect(self.model, self.optimizer)

    def _load_snapshot(self, model: torch.nn.Module) -> None:
        snapshot = load()
        if snapshot:
            model.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.first = snapshot["epoch"]

    def _save_snapshot(self, epoch: int) -> None:
        reach(f"before-{epoch}")
        save({"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": epoch + 1})
        reach(f"saved-{epoch}")

    def _run_batch(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch: int) -> None:
        self.train_loader.sampler.set_epoch(epoch)
        for step, (x, y) in self.job.batches(self.train_loader):
            with step:
                reach(f"epoch-{epoch}")
                self._run_batch(x, y)

    def train(self, epochs: int) -> None:
        torch.manual_seed(100 * self.first + dist.get_rank())
        for epoch in self.job.epochs(epochs, start=self.first):
            self._run_epoch(epoch)
            if dist.get_rank() == 0 and epoch % 2:
                self._save_snapshot(epoch)


def main() -> None:
    dist.init_process_group("ftrun")
    trainer = Trainer()
    trainer.train(int(os.environ["EPOCHS"]))
    finish(trainer.model, trainer.optimizer)


if __name__ == "__main__":
    main()
