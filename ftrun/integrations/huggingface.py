"""Provide `Trainer` and `TrainingArguments` of transformers, with training steps that ftrun repairs in place.

    from ftrun.integrations.huggingface import Trainer, TrainingArguments  # instead of: from transformers import ...

Theory of operation. transformers has no public hook around a whole training step, so this Trainer rewrites
`Trainer._run_epoch`, line by line, as one loop over the updates of all epochs, with `with step:` around each update. The work
after an update (callbacks, logs, an evaluation, a checkpoint) is owed (`_Places.owed`) until a `job.call` before the next
step does it. `_check` refuses a release without one of the private hooks in `_NEEDED`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import skip_first_batches
from accelerate.state import GradientState
from accelerate.utils import synchronize_rng_states
from transformers.trainer_callback import ExportableState

import ftrun
from ftrun.core.errors import UsageError
from ftrun.integrations import another_release, scaler_of
from ftrun.worker.link.run_link import Context

# Private methods of transformers' Trainer and accelerate's GradientState that the loop below uses: method -> parameters.
_NEEDED = {
    "_run_epoch": {
        "model",
        "epoch",
        "train_dataloader",
        "steps_in_epoch",
        "num_update_steps_per_epoch",
        "epochs_trained",
    },
    "_maybe_log_save_evaluate": {
        "tr_loss",
        "grad_norm",
        "model",
        "trial",
        "epoch",
        "ignore_keys_for_eval",
        "learning_rate",
    },
    "_load_rng_state": {"checkpoint"},
    "_track_num_input_tokens": {"inputs"},
    "_clip_grad_norm": {"model"},
    "_get_grad_norm": {"model", "grad_norm"},
    "_get_learning_rate": set(),
    "_set_sync_gradients": {"sync_gradients"},
}


@dataclasses.dataclass
class TrainingArguments(transformers.TrainingArguments):
    """transformers' own arguments; create the process group with backend "ftrun" before accelerate creates one."""

    def __post_init__(self: Any) -> None:
        if dist.is_torchelastic_launched() and not dist.is_initialized():
            if self.ddp_backend not in (None, "ftrun"):
                raise UsageError(
                    f'TrainingArguments(ddp_backend="{self.ddp_backend}"): leave it out, or set it to "ftrun"'
                )
            dist.init_process_group("ftrun", timeout=timedelta(seconds=self.ddp_timeout))
        if self.ddp_backend == "ftrun":
            self.ddp_backend = None  # accelerate rejects unknown backends, and uses the existing group
        super().__post_init__()


class Trainer(transformers.Trainer):
    """transformers' own Trainer, whose `train()` protects model, optimizer and scheduler, and repairs steps in place.

    `job` is the `ftrun.Job` once `train()` has begun. Each step keeps the state of callbacks that are `ExportableState`, such as
    EarlyStoppingCallback; a fault may repeat an evaluation, a log or a checkpoint.
    """

    job: ftrun.Job | None = None
    control: Any

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        context = Context.current
        if context is not None and context.restoring:
            resume_from_checkpoint = (
                None  # a replacement has newer state, and the folder may have changed since its rank began
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # a loader would broadcast random state at each start, a collective that a replacement cannot do alone; see _run_epoch
        self.accelerator.rng_types = []

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        evaluate = functools.partial(super().evaluate, *args, **kwargs)
        return evaluate() if self.job is None or self.is_in_train else self.job.call(evaluate)

    def _run_epoch(
        self,
        model: Any,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        trial: Any,
        ignore_keys_for_eval: Any,
        start_time: float,
        resume_from_checkpoint: Any,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
        **unknown: Any,
    ) -> None:
        """Run all epochs, since a replacement begins in the current one; transformers calls this once."""
        _check(self, train_dataloader, unknown)
        args, state = self.args, self.state
        generator = getattr(train_dataloader, "synchronized_generator", None)
        if generator is not None:  # synchronize once, as accelerate's loader would
            synchronize_rng_states(["generator"], generator)
        if resume_from_checkpoint is not None and not steps_trained_in_current_epoch:
            self._load_rng_state(resume_from_checkpoint)
        places, kept = _Places(self), _Kept(self)
        kept.begun = [state.global_step, resume_from_checkpoint if steps_trained_in_current_epoch else None]
        more = scaler_of(self.accelerator)
        job = self.job = ftrun.protect(model, self.optimizer, self.lr_scheduler, trainer=kept, places=places, **more)

        def follow_up() -> None:
            """Do the owed work of the last update: callbacks, logs, evaluation, checkpoint, end and begin of an epoch."""
            places.owed = False
            now = (state.global_step - 1) // num_update_steps_per_epoch
            report = functools.partial(
                self._maybe_log_save_evaluate,
                self._tr_loss,
                kept.grad_norm,
                model,
                trial,
                now,
                ignore_keys_for_eval,
                start_time,
                learning_rate=kept.learning_rate,
            )
            self.control = self.callback_handler.on_step_end(args, state, self.control)
            report()
            ended = state.global_step % num_update_steps_per_epoch == 0
            if self.control.should_epoch_stop and not ended and not self.control.should_training_stop:
                raise UsageError(
                    "a callback set control.should_epoch_stop: the Trainer of ftrun makes whole epochs; set "
                    "control.should_training_stop, or leave steps out with args.max_steps"
                )
            if ended or self.control.should_training_stop:
                self.control = self.callback_handler.on_epoch_end(args, state, self.control)
                report()
                if not self.control.should_training_stop and state.global_step < state.max_steps:
                    self.control = self.callback_handler.on_epoch_begin(args, state, self.control)

        updates = _Updates(train_dataloader, args.gradient_accumulation_steps, steps_in_epoch)
        first, checkpoint = kept.begun
        for step, fetch in job.late_batches(updates, state.max_steps, first):
            if places.owed:
                job.call(follow_up)
            if self.control.should_training_stop:
                with step:  # a callback ended the training: the remaining steps do nothing
                    continue
            batches = fetch()
            if checkpoint is not None and step.index == first:
                self._load_rng_state(checkpoint)
            with step:
                self._update(model, batches, step.index, num_update_steps_per_epoch, steps_in_epoch, kept)
                places.owed = True
        if places.owed:
            job.call(follow_up)
        self.control.should_training_stop = True

    def _update(
        self, model: Any, batches: list[Any], index: int, updates: int, steps_in_epoch: int, kept: _Kept
    ) -> None:
        """Run the body of a step: transformers' lines from the fetch of its batches to the new `global_step`."""
        args, state, accelerator = self.args, self.state, self.accelerator
        epoch, place = divmod(index, updates)
        batches, num_items_in_batch = self.get_batch_samples(iter(batches), len(batches), args.device)
        self.current_gradient_accumulation_steps = len(batches)
        before = place * args.gradient_accumulation_steps
        for i, inputs in enumerate(batches):
            last = i == len(batches) - 1
            sync = last or accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
            accelerator.gradient_state._set_sync_gradients(last)
            if i == 0:
                self.control = self.callback_handler.on_step_begin(args, state, self.control)
            with nullcontext() if sync else accelerator.no_sync(model=model):
                tr_loss_step = self.training_step(model, inputs, num_items_in_batch)
            if args.logging_nan_inf_filter and not tr_loss_step.isfinite():
                self._tr_loss += self._tr_loss / (1 + state.global_step - self._globalstep_last_logged)
            else:
                self._tr_loss += tr_loss_step
            self.current_flos += float(self.floating_point_ops(inputs))
            self._track_num_input_tokens(inputs)
            if not last:
                self.control = self.callback_handler.on_substep_end(args, state, self.control)
        grad_norm = self._clip_grad_norm(model) if args.max_grad_norm > 0 else None
        kept.grad_norm = self._get_grad_norm(model, grad_norm=grad_norm)
        kept.learning_rate = self._get_learning_rate()
        self.control = self.callback_handler.on_pre_optimizer_step(args, state, self.control)
        self.optimizer.step()
        self.control = self.callback_handler.on_optimizer_step(args, state, self.control)
        if not accelerator.optimizer_step_was_skipped and not _by_metric(self.lr_scheduler):
            self.lr_scheduler.step()
        model.zero_grad()
        state.global_step += 1
        state.epoch = epoch + (before + len(batches)) / steps_in_epoch


class _Updates:
    """Groups a loader's batches into lists, one for each update."""

    def __init__(self, loader: Any, size: int, batches: int) -> None:
        self.loader = loader
        self.epoch = 0
        self._size, self._batches = size, batches

    def __len__(self) -> int:
        return max(1, -(-self._batches // self._size))

    def __iter__(self) -> Iterator[list[Any]]:
        return self.iterate_from(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)
        # the loader does not pass the epoch on to a batch sampler that accelerate wraps
        inner: Any = getattr(getattr(self.loader, "batch_sampler", None), "batch_sampler", None)
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(epoch)

    def iterate_from(self, updates: int) -> Iterator[list[Any]]:
        """Return an iterator over this epoch's lists after the first `updates`. The loader starts, and draws random numbers, now."""
        skip = updates * self._size
        iterator = iter(skip_first_batches(self.loader, skip) if skip else self.loader)
        begun = itertools.chain([next(iterator)], iterator)
        return (
            list(itertools.islice(begun, min(self._size, self._batches - at)))
            for at in range(skip, self._batches, self._size)
        )


class _Places:
    """The part of a Trainer's state that an update changes equally on all ranks."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.owed = False  # the last update's callbacks, logs and checkpoint are still to do

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        return {"global_step": state.global_step, "epoch": state.epoch, "owed": self.owed}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        state = self._trainer.state
        state.global_step, state.epoch, self.owed = saved["global_step"], saved["epoch"], saved["owed"]


class _Kept:
    """The rest of a Trainer's state: history, control, sums of losses, exportable callbacks."""

    _NOT = frozenset(
        {"global_step", "epoch", "log_history", "stateful_callbacks", "is_local_process_zero", "is_world_process_zero"}
    )

    _REST = (
        "_total_loss_scalar",
        "_globalstep_last_logged",
        "_initial_global_step",
        "_initial_num_input_tokens_seen",
        "current_flos",
    )

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.grad_norm: Any = None
        self.learning_rate: float | None = None
        self.begun: list[Any] = [
            0,
            None,
        ]  # the first step, and the checkpoint with its random state if that step is amid an epoch
        self._history: tuple[int, str] = (-1, "")  # cached length and text: the history only grows, and a step reads it thrice

    def _callbacks(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state, history = trainer.state, trainer.state.log_history
        if self._history[0] != len(history):
            self._history = len(history), json.dumps(history)
        fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name not in self._NOT}
        return {
            "state": json.dumps(fields),
            "history": self._history[1],
            "control": trainer.control.state()["args"],
            "callbacks": json.dumps([one.state()["attributes"] for one in self._callbacks()]),
            "tr_loss": trainer._tr_loss.detach(),
            "rest": json.dumps({name: getattr(trainer, name) for name in self._REST}),
            "begun": self.begun,
            "grad_norm": self.grad_norm.detach() if isinstance(self.grad_norm, torch.Tensor) else self.grad_norm,
            "learning_rate": self.learning_rate,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        for name, value in json.loads(saved["state"]).items():
            setattr(trainer.state, name, value)
        trainer.state.log_history[:] = json.loads(saved["history"])
        self._history = len(trainer.state.log_history), saved["history"]
        trainer.control.__dict__.update(saved["control"])
        for one, attributes in zip(self._callbacks(), json.loads(saved["callbacks"]), strict=True):
            one.__dict__.update(attributes)
        trainer._tr_loss = saved["tr_loss"].to(trainer.args.device)
        trainer.__dict__.update(json.loads(saved["rest"]))
        self.begun = saved["begun"]
        self.grad_norm, self.learning_rate = saved["grad_norm"], saved["learning_rate"]


def _by_metric(scheduler: Any) -> bool:
    """Does the scheduler step after an evaluation, by its result?"""
    greedy = getattr(transformers.trainer, "GreedyLR", torch.optim.lr_scheduler.ReduceLROnPlateau)
    return isinstance(scheduler, (torch.optim.lr_scheduler.ReduceLROnPlateau, greedy))


def _check(trainer: Trainer, loader: Any, unknown: dict[str, Any]) -> None:
    """Raise UsageError, with the option or the missing hook, for a run that ftrun cannot repair in place."""
    for name, wanted in _NEEDED.items():
        method = getattr(transformers.Trainer, name, getattr(GradientState, name, None))
        found = set(inspect.signature(method).parameters) if method is not None else set()
        if method is None or not wanted <= found or unknown:
            differs = ", ".join(sorted((wanted - found) | unknown.keys())) or "it is gone"
            has = f"{transformers.__version__} has another Trainer.{name} ({differs})"
            raise another_release("transformers", has, "5.20 to 5.23")
    if trainer.job is not None:
        raise UsageError(
            "Trainer.train() a second time: its model and optimizer were protected once; use a new process"
        )
    args = trainer.args
    refused = {
        "deepspeed": trainer.is_deepspeed_enabled,
        "fsdp": trainer.is_fsdp_enabled,
        "auto_find_batch_size": args.auto_find_batch_size,
        "several GPUs in one process (n_gpu > 1)": args.n_gpu > 1,
        "hyperparameter_search": trainer.state.is_hyper_param_search,
        "a train_dataset without a length": not hasattr(loader, "__len__"),
        "accelerator_config dispatch_batches": type(loader).__name__ == "DataLoaderDispatcher",
        "ignore_data_skip with a checkpoint": args.ignore_data_skip and trainer.state.global_step > 0,
    }
    for what, is_set in refused.items():
        if is_set:
            raise UsageError(
                f"the Trainer of ftrun.integrations.huggingface cannot repair a run with {what} in place; use transformers' own, "
                "which ftrun restarts from its checkpoint"
            )
