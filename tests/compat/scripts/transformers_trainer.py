"""A transformers Trainer on a small random model. Knows nothing but what transformers does under torchrun.

Each rank prints one JSON line at the end. With `--stop-at N`, rank 1 kills itself at step N of its first attempt, and a
later attempt goes on from the newest checkpoint in `--out`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

WORDS, LENGTH = 64, 16


class Counting(Dataset):
    """Sentences that count upwards by a step of their own."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) * (1 + index % 5) + index) % WORDS
        return {"input_ids": tokens, "labels": tokens}


class Stop(TrainerCallback):
    """Kills rank 1 before `step` of the first attempt."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if (
            state.global_step == self.step
            and args.process_index == 1
            and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        ):
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--stop-at", type=int, default=-1)
    options = parser.parse_args()
    set_seed(7)
    shape = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **shape))
    arguments = TrainingArguments(
        output_dir=options.out,
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=5,
        save_steps=5,
        save_total_limit=1,
        eval_strategy="steps",
        eval_steps=10,
        report_to=[],
        disable_tqdm=True,
        seed=7,
    )
    trainer = Trainer(
        model, arguments, train_dataset=Counting(), eval_dataset=Counting(), callbacks=[Stop(options.stop_at)]
    )
    found = get_last_checkpoint(options.out) if os.path.isdir(options.out) else None
    trainer.train(resume_from_checkpoint=found)
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().numpy().tobytes())
    answer = {
        "rank": arguments.process_index,
        "world_size": arguments.world_size,
        "mode": arguments.parallel_mode.value,
        "begun_at": int(os.path.basename(found).rpartition("-")[2]) if found else 0,
        "steps": trainer.state.global_step,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "eval_loss": trainer.evaluate()["eval_loss"],
        "weights": digest.hexdigest(),
    }
    print("answer", json.dumps(answer), flush=True)


main()
