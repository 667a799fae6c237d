"""`ftrun.protect` and `ftrun.Job`: what the training script sees."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ftrun.core.board import Flag, Phase
from ftrun.core.errors import UsageError, WorkerError
from ftrun.core.tried import TORCH_RANGE, TORCH_TO, version_of
from ftrun.worker.api.backend import registry
from ftrun.worker.engine import Engine
from ftrun.worker.restore import restore
from ftrun.worker.runtime import compiling, torch_private
from ftrun.worker.runtime.exception_report import give_up
from ftrun.worker.runtime.run_link import Context
from ftrun.worker.state.protected_state import Protected
from ftrun.worker.step import Step

T = TypeVar("T")

_job: Job | None = None


class Job:
    """A training run of this rank. Made by `protect`; outside ftrun it only counts steps."""

    def __init__(
        self, engine: Engine | None, modules: list[torch.nn.Module], optimizers: list[Any], stateful: dict[str, Any]
    ) -> None:
        self._engine = engine
        self._modules = modules
        self._optimizers = optimizers
        self._stateful = stateful
        self._loaded = 0

    # -- facts -------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        for module in self._modules:
            for param in module.parameters():
                return param.device
        return torch.device("cpu")

    @property
    def generation(self) -> int:
        """Number of the world that runs now; grows by one with each incident. 0 outside ftrun."""
        return self._engine.context.generation if self._engine else 0

    @property
    def start_step(self) -> int:
        """Step at which the loop starts: 0, or the loaded checkpoint's. The same on every rank, on a replacement too."""
        return self._loaded

    # -- loops -------------------------------------------------------------------------------------------------------

    def steps(self, total: int, start: int | None = None) -> Iterator[Step]:
        """Steps `start` (default: 0, or the loaded checkpoint's step) up to `total`, each until it is committed."""
        first = self._loaded if start is None else start
        if self._engine is None:
            return self._bare(first, total)
        return self._protected(self._engine, first, total)

    def _bare(self, first: int, total: int) -> Iterator[Step]:
        for index in range(first, total):
            step = Step(index)
            yield step
            if not step.entered:
                raise UsageError(f"step {index} was taken from the loop, but its `with step:` was skipped")

    def _protected(self, engine: Engine, first: int, total: int) -> Iterator[Step]:
        context = engine.context
        engine.outside_body("job.steps")
        length = max(total - first, 0)
        if engine.loop_is_over(first, length):
            return
        context.cell.drop_flag(Flag.LOOP_DONE)
        engine.finish_recording()
        number = engine.enter_loop()
        end = engine.base + length
        while True:
            if context.stop_pending():
                number = engine.rejoin(rewind=False)
            if number >= end:
                if engine.end_loop(end):
                    return
                number = engine.rejoin(rewind=False)
                continue
            engine.hand_out(number)
            step = Step(engine.index_of(number), number, engine)
            yield step
            engine.outside_body("the next step")
            if not step.entered:
                raise UsageError(f"step {step.index} was taken from the loop, but its `with step:` was skipped")
            if step.let_out:
                give_up(context, step.index)
            number = number + 1 if step.committed else engine.rejoin(rewind=True)

    def batches(self, loader: Iterable[Any], epochs: int = 1) -> Iterator[tuple[Step, Any]]:
        """(step, batch) over `epochs` passes of a loader; keeps its place, and gives the same batch when a step is redone."""
        from ftrun.worker.loader import batches

        return batches(self, self._engine, loader, epochs)

    def call(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function that communicates, between hand-out and `with step`; done again by everyone after a fault."""
        engine = self._engine
        if engine is None or not engine.registry.looping or engine.registry.between:
            return fn(*args, **kwargs)
        return engine.calls.run(lambda: fn(*args, **kwargs))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], step: int = 0) -> None:
        """Write a checkpoint (torch.save of state dicts and the next step) whole or not at all; call on one rank."""
        state = {
            "step": step,
            "models": [m.state_dict() for m in self._modules],
            "optimizers": [o.state_dict() for o in self._optimizers],
            "stateful": {k: v.state_dict() for k, v in self._stateful.items() if hasattr(v, "state_dict")},
        }
        temporary = f"{os.fspath(path)}.{os.getpid()}.tmp"
        try:
            torch.save(state, temporary)
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Read a checkpoint of `save` on every rank, before the loop; returns (and starts at) the step after it."""
        if self._engine is not None and self._engine.step >= 0:
            raise UsageError("job.load after the first step; load before the loop")
        if self._engine is not None and self._engine.resume >= 0:
            # a replacement has newer state already, and the file may have been overwritten since
            self._loaded = int(self._engine.state.manifest.facts.get("loaded", 0))
            return self._loaded
        state = torch.load(path, map_location=self.device, weights_only=True)
        for module, saved in zip(self._modules, state["models"], strict=True):
            module.load_state_dict(saved)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name, saved in state["stateful"].items():
            self._stateful[name].load_state_dict(saved)
        self._loaded = int(state["step"])
        if self._engine is not None:
            self._engine.reload(self._loaded)
        return self._loaded


def protect(*, model: Any, optimizer: Any, **stateful: Any) -> Job:
    """Guard the training state of this rank; call once, after init_process_group("ftrun") and after DDP.

    `model`, `optimizer`: one object, or a list or dict of them. `stateful`: schedulers, scalers, loaders: anything with
    state_dict() and load_state_dict(), or a torch.Generator. Under plain python or torchrun it protects nothing.
    Errors: UsageError.
    """
    global _job
    modules, optimizers = _each(model, torch.nn.Module, "model"), _each(optimizer, torch.optim.Optimizer, "optimizer")
    for name, thing in stateful.items():
        if not isinstance(thing, torch.Generator) and not (
            hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
        ):
            raise UsageError(
                f"protect({name}=...): {type(thing).__name__} objects have no state_dict()/load_state_dict()"
            )
    if _job is not None:
        raise UsageError("protect() was called before; give it all models and optimizers at once")
    params = [p for m in modules for p in m.parameters()]
    if not params:
        raise UsageError("protect(): the model has no parameters")
    devices = sorted({str(p.device) for p in params})
    if len(devices) > 1:
        raise UsageError(
            f"protect(): the model is on several devices ({', '.join(devices)}); put each rank's model on one"
        )
    context = Context.current
    if context is None or not context.is_main_process():
        _job = Job(None, modules, optimizers, stateful)
        return _job
    _refuse_spread(modules)
    if params[0].device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"protect(): models on {params[0].device.type} are not supported by ftrun; "
            "train on cuda or cpu, or run the script without protect() (all workers restart on a failure)"
        )
    _check_torch(context, modules)
    _job = Job(_guard(context, modules, optimizers, stateful), modules, optimizers, stateful)
    return _job


def _check_torch(context: Context, modules: list[torch.nn.Module]) -> None:
    """Is this torch one that can be guarded? Errors: UsageError. Warns, once a run, of one that was never tried."""
    is_ddp = any(isinstance(module, DistributedDataParallel) for module in modules)
    torch_private.require(torch_private.PROTECT, *([torch_private.DDP] if is_ddp else []))
    if version_of(torch.__version__)[:2] <= TORCH_TO or context.rank != 0:
        return
    with contextlib.suppress(FileExistsError):
        os.close(os.open(context.run_dir / "torch-untried", os.O_CREAT | os.O_EXCL, 0o600))
        print(
            f"ftrun: torch {torch.__version__} is newer than what ftrun was tried with ({TORCH_RANGE}); "
            "compare a repaired run with a clean one by `ftrun verify`",
            file=sys.stderr,
        )


def _refuse_spread(modules: list[torch.nn.Module]) -> None:
    # a model has such parameters only when that module is loaded; importing it here would take a second
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    for module in modules if tensor is not None else ():
        for name, param in module.named_parameters():
            if isinstance(param, tensor.DTensor):
                raise UsageError(
                    f"protect(): parameter {name} is a DTensor (FSDP2's fully_shard, or tensor parallelism), which ftrun cannot "
                    "guard yet; run the script without protect(), and let it continue from its checkpoint after a restart "
                    "(--max-restarts)"
                )


def _guard(context: Context, modules: list[Any], optimizers: list[Any], stateful: dict[str, Any]) -> Engine:
    groups = registry()
    if not dist.is_initialized():
        raise UsageError('protect() before init_process_group("ftrun"): make the process group first')
    if groups is None or dist.get_backend() != "ftrun":
        raise UsageError(
            f'protect() needs init_process_group("ftrun"), and this script made a "{dist.get_backend()}" group, '
            "which cannot be rebuilt in place"
        )
    for optimizer in optimizers:
        if type(optimizer).__name__ in (
            "ZeroRedundancyOptimizer",
            "DeepSpeedZeroOptimizer",
            "DeepSpeedZeroOptimizer_Stage3",
        ):
            raise UsageError(f"{type(optimizer).__name__} communicates in step(), which cannot be recovered exactly")
    state = Protected(modules, optimizers, stateful)
    engine = Engine(context, groups, state)
    if context.restoring:
        restore(engine, state)
    else:
        engine.start_fresh()
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(_before_update(engine))
    engine.lookout.install(engine, modules)
    compiling.stay_out()
    compiling.excuse(context)
    for module in modules:
        module.register_forward_pre_hook(lambda *_: engine.forward_started())
        module.register_forward_hook(_after_forward(engine))
    context.phase(Phase.IDLE)
    return engine


def _each(value: Any, kind: type, name: str) -> list[Any]:
    things = (
        list(value.values())
        if isinstance(value, dict)
        else list(value)
        if isinstance(value, (list, tuple))
        else [value]
    )
    for thing in things:
        if not isinstance(thing, kind):
            raise UsageError(f"protect({name}=...): expected {kind.__name__}, got {type(thing).__name__}")
    return things


def _before_update(engine: Engine) -> Callable[..., None]:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if any(callable(a) for a in args) or kwargs.get("closure") is not None:
            raise UsageError(
                "optimizer.step(closure) calls the model several times a step and cannot be recovered exactly"
            )
        if engine.current is None:
            raise UsageError("optimizer.step() of a protected optimizer outside `with step:`")
        engine.current.optimizer_steps(optimizer)

    return hook


def _after_forward(engine: Engine) -> Callable[..., None]:
    def hook(module: Any, args: Any, output: Any) -> None:
        if not engine.context.in_body or engine.passed:
            return
        tensor = _differentiable(output)
        if tensor is not None:
            tensor.register_hook(lambda grad: engine.backward_started())

    return hook


def _differentiable(value: Any) -> torch.Tensor | None:
    """The first tensor in a model's output that a backward will reach."""
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad else None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for item in items:
        found = _differentiable(item)
        if found is not None:
            return found
    return None


__all__ = ["Job", "WorkerError", "protect"]
