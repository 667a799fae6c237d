"""Refuse, where it happens, each change that a script may not make once its state is protected."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ftrun.core.errors import UsageError
from ftrun.worker.link.callers import caller
from ftrun.worker.state.protected_state import ProtectedState


def watch(state: ProtectedState) -> None:
    """Refuse from now on a new parameter or buffer in a protected model, a foreign optimizer on its parameters, and a later DDP."""
    modules = [part for root in state.modules for part in root.modules()]
    if state.shards.states:  # FSDP2 sets gathered parameters by a class's own __setattr__
        modules = [part for part in modules if type(part).__setattr__ is torch.nn.Module.__setattr__]
    parts = {id(part) for part in modules}
    tensors = {id(param) for param in state.tensors}
    optimizers = {id(optimizer) for optimizer in state.optimizers}

    def registered(module: torch.nn.Module, name: str, value: Any) -> None:
        if value is None or id(module) not in parts:
            return
        if isinstance(value, torch.nn.Parameter):
            kind, known = "parameter", value is getattr(module, name, None)
        else:
            kind, known = "buffer", name in dict(module.named_buffers(recurse=False))
            state.reassigned = True
        if not known:
            raise UsageError(
                f"{kind} {name} of a protected {type(module).__name__} was made or replaced at {caller()}: ftrun keeps what the "
                f"model had at protect(); make it before, or write into the one there is ({name}.data.copy_(...))",
                explain="F310",
            )

    def wrapped(module: torch.nn.Module, name: str, value: Any) -> None:
        if not isinstance(module, DistributedDataParallel) or name != "module":
            return
        if any(id(param) in tensors for param in value.parameters()):
            raise UsageError(
                f"DistributedDataParallel of a model that is protected already, at {caller()}: wrap it first, and give the "
                "wrapped model to protect()",
                explain="F311",
            )

    def steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in optimizers:
            return
        if any(id(param) in tensors for group in optimizer.param_groups for param in group["params"]):
            raise UsageError(
                f"an optimizer that protect() was not given updates protected parameters, at {caller()}: give it too, as in "
                "protect(optimizer=[first, second])",
                explain="F312",
            )

    register_module_parameter_registration_hook(registered)
    register_module_buffer_registration_hook(registered)
    register_module_module_registration_hook(wrapped)
    register_optimizer_step_pre_hook(steps)
