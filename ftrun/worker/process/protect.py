"""`ftrun.protect` assembles the parts that guard a rank's training state.

torch has called the backend before (see backend.py), and the groups that this made are passed in here.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ftrun.core.errors import UsageError
from ftrun.core.paths import ENV_ERROR_FILE, logged_values
from ftrun.core.shared.board import Head, Phase
from ftrun.core.tried import SHARDED_RANGE, TORCH_RANGE, TORCH_TO, version_of
from ftrun.worker.link import compiling
from ftrun.worker.link.run_link import Context
from ftrun.worker.process.backend import registry
from ftrun.worker.process.job import Job
from ftrun.worker.repair import assembly
from ftrun.worker.repair.fully_sharded import refuse_unknown
from ftrun.worker.repair.pipelines import Pipeline, has_a_part
from ftrun.worker.repair.replacement import restore
from ftrun.worker.state.logged_values import LOGGED, LoggedValues
from ftrun.worker.state.meshes import show_mesh
from ftrun.worker.state.protected_state import ProtectedState
from ftrun.worker.state.shards import is_spread
from ftrun.worker.step import observers
from ftrun.worker.step.loop import Loop
from ftrun.worker.torch_compat import pipeline_private, sharded_private, torch_private
from ftrun.worker.variables.guarded_memory import GuardedMemory
from ftrun.worker.variables.variables import Variables

_job: Job | None = None


def protect(
    model: Any,
    optimizer: Any,
    *more: Any,
    replicas: Any = None,
    ignore: Iterable[Any] = (),
    variables: str | Iterable[str] = "auto",
    **stateful: Any,
) -> Job:
    """Guard the training state of this rank; call once, after init_process_group("ftrun") and after DDP.

    Args:
        model: One module, or a list or dict of them.
        optimizer: One optimizer, or a list or dict of them.
        *more: Schedulers, scalers, loaders: anything with state_dict() and load_state_dict(), or a torch.Generator. ftrun detects
            schedules of torch.distributed.pipelining when the first loop begins.
        replicas: A process group, or a one-dimensional DeviceMesh, whose ranks hold the same weights and optimizer state as
            this one without DistributedDataParallel, which proves it by itself. ftrun compares them at every gate; once they differ
            no rank gets the values of another one any more.
        variables: The script's own variables that ftrun keeps with the step, beside those of `job.state`: "off"; "auto", all that the
            loop changes and Python can copy; or names, of variables and of attributes (`["best", "self.meters"]`).
        ignore: Live objects, or names of variables, that ftrun need not keep; the search for forgotten state skips them.
        **stateful: As `more`, by names that messages use.

    Returns:
        The job. Under plain python or torchrun it protects nothing.

    Raises:
        UsageError: If ftrun cannot guard something.
    """
    global _job
    stateful = {f"{type(thing).__name__} {number}": thing for number, thing in enumerate(more)} | stateful
    schedules = {name: Pipeline(thing) for name, thing in stateful.items() if pipeline_private.is_schedule(thing)}
    stateful = {name: thing for name, thing in stateful.items() if name not in schedules}
    modules, wrapped = _each(model, torch.nn.Module, "model"), _each(optimizer, torch.optim.Optimizer, "optimizer")
    optimizers = [_unwrapped(optimizer) for optimizer in wrapped]
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
    _refuse_lazy(modules)
    devices = sorted({str(p.device) for p in params})
    if len(devices) > 1:
        raise UsageError(
            f"protect(): the model is on several devices ({', '.join(devices)}); put each rank's model on one"
        )
    context = Context.current
    if context is None or not context.is_main_process():
        _job = Job(None, modules, optimizers, stateful)
        return _job
    if params[0].device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"protect(): models on {params[0].device.type} are not supported by ftrun; "
            "train on cuda or cpu, or run the script without protect() (all workers restart on a failure)"
        )
    _check_torch(context, modules)
    refuse_unknown(modules)
    show_mesh(context, params, replicas)
    errors = os.environ.get(ENV_ERROR_FILE)
    logged = LoggedValues(logged_values(Path(errors)) if errors and context.rank == 0 else None)
    state = ProtectedState(modules, optimizers, {**stateful, **schedules, LOGGED: logged}, _ranks_of(replicas))
    state.holders.differ = lambda: bool(context.board[Head.DIFFER])
    known = {**{f"optimizer {i}": one for i, one in enumerate([*optimizers, *wrapped])}, **stateful}
    kept = Variables(modules, known, list(ignore), _names_of(variables), GuardedMemory(state))
    _job = Job(_guard(context, state, kept, logged), modules, optimizers, stateful)
    return _job


def _names_of(variables: str | Iterable[str]) -> list[str] | None:
    """Return the names of the variables to keep, None = all.

    Raises:
        UsageError: For another word.
    """
    if variables == "auto":
        return None
    if variables == "off":
        return []
    if isinstance(variables, str):
        raise UsageError(f'protect(variables={variables!r}): expected "auto", "off" or a list of names')
    return list(variables)


def _refuse_lazy(modules: list[torch.nn.Module]) -> None:
    """Refuse a module whose parameters or buffers have no shape yet. Raises UsageError."""
    for module in modules:
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            if is_lazy(tensor):
                raise UsageError(
                    f"protect(): {name} of the model has no shape before its first forward (a Lazy module): call the model once, on an "
                    "input of the right shape, before DistributedDataParallel and protect()"
                )


def _check_torch(context: Context, modules: list[torch.nn.Module]) -> None:
    """Check that ftrun can guard this torch; warn once a run if nobody has tried ftrun with it.

    Raises:
        UsageError: If torch lacks something.
    """
    is_ddp = any(isinstance(module, DistributedDataParallel) for module in modules)
    is_sharded = any(is_spread(param) for module in modules for param in module.parameters())
    torch_private.require(torch_private.NAMES, torch_private.PROTECT, *[torch_private.DDP] * is_ddp)
    if is_sharded:
        torch_private.require(sharded_private.NAMES, sharded_private.SHARDED, torch=SHARDED_RANGE)
    if pipeline_private.is_loaded():
        torch_private.require(pipeline_private.NAMES, pipeline_private.PIPELINE)
    if version_of(torch.__version__)[:2] <= TORCH_TO or context.rank != 0:
        return
    with contextlib.suppress(FileExistsError):
        os.close(os.open(context.run_dir / "torch-untried", os.O_CREAT | os.O_EXCL, 0o600))
        print(
            f"ftrun: torch {torch.__version__} is newer than what ftrun was tried with ({TORCH_RANGE}); "
            "compare a repaired run with a clean one by `ftrun verify`",
            file=sys.stderr,
        )


def _ranks_of(replicas: Any) -> tuple[int, ...]:
    """Return the global ranks of a group or a mesh.

    Raises:
        UsageError: If it is neither.
    """
    if replicas is None:
        return ()
    group = replicas.get_group() if hasattr(replicas, "get_group") else replicas
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (RuntimeError, ValueError, TypeError, AttributeError):
        raise UsageError(
            f"protect(replicas=...): expected a process group or a DeviceMesh, got {type(replicas).__name__}"
        ) from None


def _guard(
    context: Context, state: ProtectedState, variables: Variables, logged: LoggedValues
) -> Loop:
    groups = registry()
    if not dist.is_initialized():
        raise UsageError('protect() before init_process_group("ftrun"): make the process group first')
    if groups is None or dist.get_backend() != "ftrun":
        raise UsageError(
            f'protect() needs init_process_group("ftrun"), and this script made a "{dist.get_backend()}" group, '
            "which cannot be rebuilt in place",
            explain="F302",
        )
    groups.refuse_others()
    for optimizer in state.optimizers:
        if type(optimizer).__name__ in (
            "ZeroRedundancyOptimizer",
            "DeepSpeedZeroOptimizer",
            "DeepSpeedZeroOptimizer_Stage3",
        ):
            raise UsageError(f"{type(optimizer).__name__} communicates in step(), which cannot be recovered exactly", explain="F314")
    kit = assembly.kit(context, groups, state, variables, logged)
    observers.add(kit)
    if context.restoring:
        restore(kit)
    else:
        assembly.lay_out(kit)
        _tell_of_no_replica(context, state)
        _tell_of_copies_on_one_node(context, state)
    loop = observers.watched_loop(kit)
    compiling.stay_out()
    compiling.excuse(context)
    context.phase(Phase.IDLE)
    return loop


def _tell_of_no_replica(context: Context, state: ProtectedState) -> None:
    """Warn at the start of each model that no other rank is known to hold."""
    alone = [] if context.rank != 0 or dist.get_world_size() == 1 or has_a_part(state.tensors) else state.holders.modules_alone()
    if not alone:
        return
    names = ", ".join(f"{type(state.modules[i]).__name__} (model {i})" for i in alone)
    print(
        f"ftrun: no other rank is known to hold the same values of {names}: a rank that dies in its update cannot be replaced in place, "
        "and only a host snapshot helps (--snapshot-every). If all ranks hold the same, say so: protect(..., "
        "replicas=torch.distributed.group.WORLD); a model that nothing changes need not be given to protect()",
        file=sys.stderr,
        flush=True,
    )


def _tell_of_copies_on_one_node(context: Context, state: ProtectedState) -> None:
    """Warn if the loss of a node would take every copy of a shard with it, although a spare node waits."""
    world = context.world
    if context.rank != 0 or world is None or world.span is None or not world.span.mirrored or context.snapshot_every > 0:
        return
    if (state.is_sharded or has_a_part(state.tensors)) and state.holders.of_everything() <= world.here:
        print(
            f"ftrun: every copy of this rank's part of the model is on node {world.span.node}: if that node is lost, all ranks restart "
            "from the checkpoint. With --snapshot-every K the next node has a copy of each host snapshot; a layout with replicas on other "
            "nodes (HSDP) needs none",
            file=sys.stderr,
            flush=True,
        )


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


def _unwrapped(optimizer: Any) -> Any:
    """Return the torch optimizer inside a framework's optimizer."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
