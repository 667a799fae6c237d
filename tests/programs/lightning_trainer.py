"""A Trainer of Lightning: accumulated batches, a rate for each step, validations, checkpoints, an end that a callback decides."""

import torch
from common import OUT, finish, net, reach, samples
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, index):
        reach(f"batch-{self.trainer.current_epoch}.{index}")
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        reach(f"validation-{self.trainer.current_epoch}")
        self.log("validation", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self):
        reach(f"validated-{self.trainer.current_epoch}")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9), "interval": "step"}]


class Reaching(Callback):
    """Places in an update, after its gate, at which a test kills."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        reach(f"updated-{trainer.current_epoch}.{index}")


seed_everything(7, verbose=False)
model = Classifier()
trainer = Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=4,
    max_epochs=6,
    accumulate_grad_batches=2,
    callbacks=[
        Reaching(),
        EarlyStopping("validation", patience=2, min_delta=0.02),
        ModelCheckpoint(OUT / "checkpoints", every_n_train_steps=7, save_top_k=-1),
    ],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
train = DataLoader(samples(176, 1), batch_size=4, shuffle=True)
trainer.fit(model, train, DataLoader(samples(64, 2), batch_size=8))
metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
finish(model, trainer.optimizers[0], metrics=metrics, steps=trainer.global_step, epochs=trainer.current_epoch)
