"""Add the observers of a rank's steps, in the order in which they hear events, and the hooks of torch that report those events."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ftrun.core.errors import UsageError
from ftrun.core.paths import ENV_DIGESTS
from ftrun.worker.link.position import Where
from ftrun.worker.repair.kit import Kit
from ftrun.worker.step import late_changes
from ftrun.worker.step.body import Body
from ftrun.worker.step.digest_recorder import DigestRecorder
from ftrun.worker.step.fault_effects import FaultEffects
from ftrun.worker.step.finite_gradients import FiniteGradients
from ftrun.worker.step.hidden_writes import HiddenWrites
from ftrun.worker.step.left_out import LeftOut
from ftrun.worker.step.loop import Loop
from ftrun.worker.step.replica_check import REPLICAS_EVERY, ReplicaCheck
from ftrun.worker.step.same_gate import SameGate
from ftrun.worker.step.same_inputs import SameInputs
from ftrun.worker.step.step_time import StepTime
from ftrun.worker.step.stop_hooks import StopHooks
from ftrun.worker.step.unreduced import Unreduced


def add(kit: Kit) -> None:
    """Add all observers: checks first, instruments last."""
    context, groups, state, looks, ledger = kit.context, kit.registry, kit.state, kit.looks, kit.ledger
    left_out = LeftOut(context, state, ledger.variables)
    replicas = ReplicaCheck(context, state, context.check_every or REPLICAS_EVERY)
    hidden = HiddenWrites(context.position, state, looks, replicas)
    looks.tell(hidden, "body_started", "model_called", "gate_reached", "step_done")
    groups.observers.add(looks, StopHooks(groups, state.modules), StepTime(groups), hidden)
    groups.observers.add(SameInputs(context), SameGate(context))
    if state.is_sharded:
        unreduced = Unreduced(kit.sharded)
        looks.tell(unreduced, "step_done")
        groups.observers.add(unreduced)
    if context.nonfinite != "ignore":
        groups.observers.add(FiniteGradients(context, state, looks, context.nonfinite))
    groups.observers.add(replicas, left_out, ledger.constants)
    folder = os.environ.get(ENV_DIGESTS)
    if folder:
        groups.observers.add(DigestRecorder(context, state, ledger, left_out, Path(folder)))
    groups.observers.add(FaultEffects(groups, state))


def watched_loop(kit: Kit) -> Loop:
    """Make the step loop, with torch's hooks that report calls of a model and steps of an optimizer."""
    state, loop = kit.state, Loop(kit)
    for optimizer in state.optimizers:
        optimizer.register_step_pre_hook(_before_update(loop.body))
        optimizer.register_step_post_hook(loop.body.update_done)
    late_changes.watch(state)
    for module in state.modules:
        # FSDP2 gathers a sharded model in such a hook: observe a call before another rank takes part in it
        module.register_forward_pre_hook(loop.body.model_called, with_kwargs=True, prepend=state.is_sharded)
        module.register_forward_hook(_after_forward(loop.body))
    return loop


def _before_update(body: Body) -> Callable[..., Any]:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> Any:
        bare = len(args) < 2 and not kwargs
        closure = None if bare else kwargs.get("closure") or next((a for a in args[1:] if callable(a)), None)
        if closure is not None:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise UsageError("LBFGS.step(closure) calls the model several times a step and cannot be recovered exactly", explain="F313")
            # other optimizers call it first: call it here, to have its gradients before the gate, and give the update its result
            with torch.enable_grad():
                given = closure()
            calls = iter((given,))
            args, kwargs = args[:1], {**kwargs, "closure": lambda: _only_once(optimizer, calls)}
        body.update_begins(optimizer, bare)
        return None if closure is None else (args, kwargs)

    return hook


def _only_once(optimizer: Any, given: Iterator[Any]) -> Any:
    for value in given:
        return value
    raise UsageError(
        f"{type(optimizer).__name__}.step(closure) calls the model several times a step and cannot be recovered exactly",
        explain="F313",
    )


def _after_forward(body: Body) -> Callable[..., None]:
    def hook(module: Any, args: Any, output: Any) -> None:
        tensor = _differentiable(output) if body.position.where is Where.BODY else None
        if tensor is not None:
            tensor.register_hook(lambda grad: body.backward_started())

    return hook


def _differentiable(value: Any) -> torch.Tensor | None:
    """Return the first tensor in a model's output that a backward will reach."""
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad else None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for item in items:
        found = _differentiable(item)
        if found is not None:
            return found
    return None
