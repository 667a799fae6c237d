"""A Lightning Trainer with strategy ddp. Knows nothing but what Lightning does under torchrun; prints a JSON line per rank.

Arguments: a folder, and the backend of the process group.
"""

from __future__ import annotations

import hashlib
import json
import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import ftrun  # noqa: F401 - makes the backend "ftrun" known


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
        )
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, wanted = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), wanted)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        inputs, wanted = batch
        self.log("validation", torch.nn.functional.mse_loss(self.layers(inputs), wanted), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.losses.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(shuffle: bool) -> DataLoader[tuple[torch.Tensor, ...]]:
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=shuffle)


def main() -> None:
    lightning.seed_everything(7)
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=DDPStrategy(process_group_backend=sys.argv[2]),
        devices=2,
        max_epochs=3,
        default_root_dir=sys.argv[1],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data(True), data(False))
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().numpy().tobytes())
    environment = trainer.strategy.cluster_environment
    answer = {
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "environment": type(environment).__name__,
        "launched_here": not environment.creates_processes_externally,
        "steps": trainer.global_step,
        "losses": model.losses,
        "validation": trainer.callback_metrics["validation"].item(),
        "weights": digest.hexdigest(),
    }
    print("answer", json.dumps(answer), flush=True)


main()
