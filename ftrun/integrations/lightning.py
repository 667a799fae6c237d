"""Provide `Trainer` of Lightning, with training steps that ftrun repairs in place.

    from ftrun.integrations.lightning import Trainer  # instead of: from lightning import Trainer

Theory of operation. Lightning has no public hook around a whole training step, so `fit` runs `_Loop`: one loop over the
batches of all epochs. Before each batch, a `job.call` does the work that Lightning owes (`_LoopState.owed`): begin an epoch,
or end a batch with its validation, checkpoints and perhaps the end of its epoch. Then `with step:` runs Lightning's `advance`.
Once training has ended ("nothing" is owed), the remaining steps do nothing. Callbacks that communicate move from `advance`
into the call, since no rank may communicate after its update. `_probe` refuses a release without the names in `_NEEDED`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from lightning.pytorch import strategies
from lightning.pytorch.callbacks import Checkpoint, Timer

import ftrun
from ftrun.core.errors import UsageError
from ftrun.integrations import another_release, scaler_of

_WRITTEN_FOR = "2.6"
try:
    from lightning.pytorch.loops.fit_loop import _FitLoop
    from lightning.pytorch.trainer.connectors.logger_connector.result import (
        _Metadata,
        _ResultCollection,
        _ResultMetric,
        _Sync,
    )
except ImportError as error:
    raise another_release("Lightning", f"{lightning.__version__}: {error}", _WRITTEN_FOR) from error

# Private names of Lightning that the code below uses: class -> its attributes.
_NEEDED = {
    "_FitLoop": ("_combined_loader", "_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"),
    "_TrainingEpochLoop": ("_results",),
    "_EvaluationLoop": ("_results",),
    "_LoggerConnector": ("_callback_metrics", "_first_loop_iter", "_current_fx"),
    "Trainer": ("_logger_connector",),
    "_ResultCollection": (),
    "_ResultMetric": ("_forward_cache", "_computed", "_update_count"),
    "_Metadata": (),
    "_Sync": ("_should",),
}
_REDUCTIONS = {"mean": torch.mean, "sum": torch.sum, "max": torch.max, "min": torch.min}
_DDP = {"auto": {}, "ddp": {}, "ddp_find_unused_parameters_true": {"find_unused_parameters": True}}
# Lightning's record of the current hook, and its replacement of the module's forward during a step
_SCRATCH = ["model 0.module._current_fx_name", "model 0.module.forward"]
_COMMUNICATING = (
    Checkpoint,
    Timer,
)  # callbacks that communicate at the end of a batch, which no rank may do after its update


class DDPStrategy(strategies.DDPStrategy):
    """Lightning's own DDPStrategy, on the backend "ftrun"."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "process_group_backend": "ftrun"})

    def process_dataloader(self, dataloader: object) -> object:
        return _Begun(dataloader) if self.lightning_module.trainer.training else dataloader


class Trainer(lightning.Trainer):
    """Lightning's own Trainer with strategy "ddp", whose `fit` protects the model and repairs steps in place.

    `job` is the `ftrun.Job` once `fit` has begun. Each step keeps the `state_dict()` of every callback; a fault may repeat a
    validation or a checkpoint.
    """

    job: ftrun.Job | None = None
    fit_loop: Any

    def __init__(self, *, strategy: Any = "auto", **kwargs: Any) -> None:
        if isinstance(strategy, str) and strategy in _DDP:
            strategy = DDPStrategy(**_DDP[strategy])
        if not isinstance(strategy, DDPStrategy):
            raise UsageError(
                f"Trainer(strategy={strategy!r}): ftrun repairs {', '.join(map(repr, _DDP))} and a DDPStrategy of "
                "ftrun.integrations.lightning in place; with others use Lightning's own Trainer"
            )
        super().__init__(strategy=strategy, **kwargs)
        theirs = self.fit_loop
        self.fit_loop = _Loop(self, min_epochs=theirs.min_epochs, max_epochs=theirs.max_epochs)
        self.fit_loop.epoch_loop = theirs.epoch_loop


class _Loop(_FitLoop):
    """Lightning's fit loop as one flat loop over the batches of all epochs."""

    def run(self) -> None:
        self._probe()
        self.setup_data()
        if self.skip:
            return
        self.reset()
        self.on_run_start()
        trainer, epochs = self.trainer, self.epoch_loop
        loader, total = self._size()
        first = self.epoch_progress.current.processed * len(loader) + epochs.batch_progress.current.ready % len(loader)
        epochs._results = _Results(training=True)
        fetcher = _Fetcher(len(loader))
        places, kept = _LoopState(self), _Memory(self)
        more = scaler_of(trainer.precision_plugin)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        job = trainer.job = ftrun.protect(
            trainer.strategy.model,
            trainer.optimizers,
            *schedulers,
            ignore=_SCRATCH,
            fit_loop=places,
            trainer=kept,
            **more,
        )

        def begin_epoch() -> None:
            self.on_advance_start()
            epochs.reset()
            epochs.on_run_start(fetcher)

        def follow_up() -> None:
            """Do the owed work between the last batch and the next one."""
            trainer.training = True  # a fault may have cut off a validation
            epochs.val_loop._results.reset()
            fetcher.done = places.owed == "last batch"
            if places.owed == "epoch":
                begin_epoch()
            else:
                self._end_batch()
                epochs.on_advance_end(fetcher)
                epochs.on_iteration_done()
            places.owed = ""
            while epochs.done:
                self.on_advance_end()
                self.on_iteration_done()
                if self.done:
                    places.owed = "nothing"
                    return
                begin_epoch()

        for step, fetch in job.late_batches(loader, total, first):
            if places.owed != "nothing":
                job.call(follow_up)
            if places.owed == "nothing":
                with step:  # training has ended before its last epoch: the remaining steps do nothing
                    continue
            fetcher.hold(fetch(), step.index)
            with self._left_for_later(), step:
                self._advance(fetcher)
                places.owed = "last batch" if fetcher.done else "batch"
        if places.owed != "nothing":
            job.call(follow_up)
        self._restarting = False
        self.on_run_end()

    def _probe(self) -> None:
        epochs, meta = self.epoch_loop, _Metadata(fx="training_step", name="")
        meta.sync = _Sync()
        logged = (_ResultMetric(meta, True), meta.sync)
        for one in (self, epochs, epochs.val_loop, self.trainer, self.trainer._logger_connector, *logged):
            for kind in type(one).__mro__:
                for name in _NEEDED.get(kind.__name__, ()):
                    if not hasattr(one, name):
                        has = f"{lightning.__version__} has no {kind.__name__}.{name}"
                        raise another_release("Lightning", has, _WRITTEN_FOR)

    def _advance(self, fetcher: _Fetcher) -> None:
        try:
            self.epoch_loop.advance(fetcher)
        except StopIteration:
            raise UsageError(
                "on_train_batch_start returned -1: the Trainer of ftrun makes whole epochs; set trainer.should_stop"
            ) from None

    @contextlib.contextmanager
    def _left_for_later(self) -> Iterator[None]:
        """Suspend the communicating callbacks and the logs that follow the update in `advance`; `_end_batch` runs them."""
        trainer = self.trainer
        callbacks, connector = trainer.callbacks, trainer._logger_connector
        trainer.callbacks = [one for one in callbacks if not isinstance(one, _COMMUNICATING)]
        connector.update_train_step_metrics = lambda: None
        try:
            yield
        finally:
            trainer.callbacks = callbacks
            del connector.update_train_step_metrics

    def _end_batch(self) -> None:
        """Run the work that `_left_for_later` suspended: callbacks before the batch counts as completed, logs after."""
        progress, trainer = self.epoch_loop.batch_progress, self.trainer
        progress.total.completed -= 1
        progress.current.completed -= 1
        for one in trainer.callbacks:
            if isinstance(one, _COMMUNICATING):
                one.on_train_batch_end(trainer, trainer.lightning_module, {}, None, self.epoch_loop.batch_idx)
        progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()

    def _size(self) -> tuple[Any, int]:
        """Return the training loader, and the largest number of batches of the training.

        Raises:
            UsageError: The training has an option that ftrun cannot repair in place.
        """
        trainer, loaders = self.trainer, self._combined_loader
        assert loaders is not None
        if not isinstance(loaders.iterables, _Begun):
            raise UsageError(
                "the Trainer of ftrun.integrations.lightning takes one DataLoader for training, no collection of them"
            )
        if self.max_batches == float("inf"):
            raise UsageError("the Trainer of ftrun.integrations.lightning needs a training DataLoader with a length")
        if trainer.reload_dataloaders_every_n_epochs:
            raise UsageError("reload_dataloaders_every_n_epochs cannot be repaired in place; leave it out")
        if not trainer.lightning_module.automatic_optimization:
            raise UsageError(
                "manual optimization cannot be repaired in place by this Trainer; write the loop with ftrun.protect"
            )
        if self.max_epochs in (None, -1) and self.max_steps == -1:
            raise UsageError("the Trainer of ftrun.integrations.lightning needs max_epochs or max_steps")
        length = int(self.max_batches)
        by_epochs = self.max_epochs * length if self.max_epochs not in (None, -1) else None
        by_steps = self.max_steps * trainer.accumulate_grad_batches if self.max_steps != -1 else None
        loader = loaders.iterables.loader
        return (
            loader if len(loader) == length else _First(loader, length),
            min(n for n in (by_epochs, by_steps) if n is not None),
        )


class _Begun:
    """A training loader that delays random draws: Lightning's unused iterator would draw at its start, before ftrun's own does."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class _First:
    """The first `length` batches of each pass of a loader, for limit_train_batches."""

    def __init__(self, loader: Any, length: int) -> None:
        self.loader = loader
        self._length = length

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.loader)
        return (next(iterator) for _ in range(self._length))


class _Fetcher:
    """A data fetcher for Lightning that returns the batch fetched by ftrun."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.fetched = 0
        self.done = False
        self._batch: Any = None

    def hold(self, batch: Any, index: int) -> None:
        self._batch, self.fetched = (batch, index % self.length, 0), index % self.length + 1
        self.done = self.fetched == self.length

    def __iter__(self) -> _Fetcher:
        return self

    def __next__(self) -> Any:
        return self._batch


class _LoopState:
    """The part of Lightning's loop state that an update changes equally on all ranks."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop
        self.owed = "epoch"  # work before the next batch: "epoch" to begin, "batch" or "last batch" to end, "nothing" any more, "" done

    def state_dict(self) -> dict[str, Any]:
        return {"loops": json.dumps(self._loop.state_dict()), "owed": self.owed, "stop": self._loop.trainer.should_stop}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        loop = self._loop
        flags = [(one, dict(vars(one))) for one in (loop, loop.epoch_loop, loop.epoch_loop.val_loop)]
        loop.load_state_dict(json.loads(saved["loops"]))
        for one, before in flags:  # a repair is no restart from a checkpoint
            for name in ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"):
                one.__dict__[name] = before[name]
        self.owed, loop.trainer.should_stop = saved["owed"], saved["stop"]


class _Memory:
    """The rest of a Trainer's state: callbacks and logged metrics."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop
        self._callbacks = list(loop.trainer.callbacks)

    def state_dict(self) -> dict[str, Any]:
        connector, results = self._loop.trainer._logger_connector, self._loop.epoch_loop._results
        return {
            "callbacks": {one.state_key: one.state_dict() for one in self._callbacks},
            # without the metrics that the results hold: a progress bar that reads them during an update must not change this state
            "metrics": {
                k: v for k, v in connector._callback_metrics.items() if k not in results.metrics(True)["callback"]
            },
            "first": connector._first_loop_iter,
            "current": connector._current_fx,
            "results": results.kept(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer, connector = self._loop.trainer, self._loop.trainer._logger_connector
        for one in self._callbacks:
            if saved["callbacks"].get(one.state_key):
                one.load_state_dict(saved["callbacks"][one.state_key])
        connector._callback_metrics = dict(saved["metrics"])
        connector._first_loop_iter, connector._current_fx = saved["first"], saved["current"]
        self._loop.epoch_loop._results.put_back(saved["results"], trainer.strategy)


class _Results(_ResultCollection):
    """The values of `self.log` in this epoch, kept so that a repeated step does not count twice."""

    _OWN = ("prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx")
    _VALUES = ("value", "cumulated_batch_size", "_forward_cache", "_computed", "_update_count", "has_reset")

    def kept(self) -> list[Any]:
        return [[key, self._meta(one.meta), self._values(one)] for key, one in self.items()]

    def _meta(self, meta: Any) -> list[Any]:
        by = next((name for name, fn in _REDUCTIONS.items() if meta.reduce_fx is fn), None)
        if by is None or meta.sync.group is not None:
            raise UsageError(
                f'self.log("{meta.name}") in {meta.fx}: ftrun keeps means, sums, maxima and minima over the whole world, no other '
                "reduce_fx or sync_dist_group"
            )
        sync = [meta.sync.should, meta.sync.rank_zero_only]
        return [meta.fx, meta.name, by, sync, {name: getattr(meta, name) for name in self._OWN}]

    def _values(self, one: Any) -> dict[str, Any]:
        if not one.is_tensor:
            raise UsageError(
                f'self.log("{one.meta.name}", a torchmetrics object) in {one.meta.fx}: what it has counted is in no state_dict(), so a '
                "replacement would begin anew; log a tensor in training, and use such objects in the validation"
            )
        values = {name: getattr(one, name, None) for name in self._VALUES}
        return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in values.items()}

    def put_back(self, saved: list[Any], strategy: Any) -> None:
        self.clear()
        for key, (fx, name, by, (should, rank_zero_only), own), values in saved:
            meta = _Metadata(fx=fx, name=name, reduce_fx=_REDUCTIONS[by], **own)
            meta.sync = _Sync(_should=should, fn=strategy.reduce, rank_zero_only=rank_zero_only)
            self[key] = one = _ResultMetric(meta, True)
            for attribute, value in values.items():
                setattr(one, attribute, value)
