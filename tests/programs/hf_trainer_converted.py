"""A Trainer of transformers: micro-batches, evaluations, checkpoints, an end that a callback decides, going on from a checkpoint."""

import os

import torch
from common import OUT, finish, reach
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from ftrun.integrations.huggingface import Trainer, TrainingArguments


class Counting(Dataset):
    """Sentences that count upwards by a step of their own."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) * (1 + index % 5) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


class Reaching(TrainerCallback):
    """Places at which a test kills, and the end of the training when the best loss does not fall any more."""

    def on_step_begin(self, args, state, control, **more):
        reach(f"step-{state.global_step}")

    def on_optimizer_step(self, args, state, control, **more):
        reach(f"update-{state.global_step}")

    def on_evaluate(self, args, state, control, **more):
        reach(f"evaluated-{state.global_step}")
        control.should_training_stop = state.global_step >= int(os.environ["STEPS"])

    def on_prediction_step(self, args, state, control, **more):
        reach(f"evaluation-{state.global_step}")

    def on_save(self, args, state, control, **more):
        reach(f"saved-{state.global_step}")


arguments = TrainingArguments(
    output_dir=str(OUT / "checkpoints"),
    use_cpu=True,
    num_train_epochs=6,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=3,
    learning_rate=1e-2,
    logging_steps=2,
    eval_strategy="steps",
    eval_steps=4,
    save_steps=4,
    save_total_limit=2,
    report_to=[],
    disable_tqdm=True,
)
shape = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **shape))
trainer = Trainer(model, arguments, train_dataset=Counting(), eval_dataset=Counting(), callbacks=[Reaching()])
last = get_last_checkpoint(OUT / "checkpoints") if (OUT / "checkpoints").exists() else None
trainer.train(resume_from_checkpoint=last)
history = [
    {k: v for k, v in entry.items() if "per_second" not in k and "runtime" not in k}
    for entry in trainer.state.log_history
]
finish(
    model,
    trainer.optimizer.optimizer,
    history=history,
    evaluated=trainer.evaluate()["eval_loss"],
    steps=trainer.state.global_step,
)
