"""Refuse sharded models that ftrun cannot put back, and drop what an interrupted step left in FSDP2."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from ftrun.core.errors import UsageError
from ftrun.worker.comm.process_group import SwapGroup
from ftrun.worker.memory.composed import is_plain
from ftrun.worker.state.shards import Shards, is_spread
from ftrun.worker.torch_compat import sharded_private
from ftrun.worker.torch_compat.sharded_private import local_of

_WITHOUT = "run the script without protect(), and let it continue from its checkpoint after a restart (--max-restarts)"


class FullySharded:
    """FSDP2 in the modules of this rank; there may be none."""

    def __init__(self, shards: Shards) -> None:
        self._states = shards.states

    def reset(self) -> None:
        """Shard every parameter again, and drop the gradients of an interrupted step."""
        if self._states:
            sharded_private.reset_fsdp(self._states)

    def unreduced(self) -> str:
        """Return a parameter whose unreduced gradient FSDP2 would carry from body to body, "" if there is none."""
        return sharded_private.unreduced(self._states)


def refuse_unknown(modules: list[torch.nn.Module]) -> None:
    """Raise UsageError for sharding or parameters that ftrun cannot put back."""
    flat: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    for module in modules:
        for part in module.modules():
            if flat is not None and isinstance(part, flat):
                raise UsageError(
                    "protect(): the model is in FullyShardedDataParallel (FSDP1), whose flat parameters ftrun cannot guard: "
                    f"use fully_shard (FSDP2), or {_WITHOUT}"
                )
            if type(part).__module__.partition(".")[0] == "deepspeed":
                raise UsageError(
                    f"protect(): the model is in DeepSpeed's {type(part).__name__}, which ftrun cannot guard; {_WITHOUT}"
                )
        for state in sharded_private.fsdp_states(module):
            for what in sharded_private.fsdp_extras(state):
                raise UsageError(
                    f"protect(): {what} keeps or moves state that ftrun cannot put back; leave it out, or {_WITHOUT}"
                )
            for group in sharded_private.groups_of(state):
                _refuse_mesh(group.mesh_info.mesh, "a model")
        for name, param in module.named_parameters():
            _refuse_kind(name, param)
        for name, buffer in module.named_buffers():
            if is_spread(buffer):
                raise UsageError(f"protect(): buffer {name} is a DTensor, which ftrun cannot guard; {_WITHOUT}")


def _refuse_kind(name: str, param: torch.Tensor) -> None:
    inner = local_of(param)
    if not is_plain(inner):
        raise UsageError(
            f"protect(): parameter {name} is a {type(inner).__module__}.{type(inner).__qualname__}, a kind of tensor that ftrun does "
            f"not know; {_WITHOUT}"
        )
    if not is_spread(param):
        return
    _refuse_mesh(getattr(param, "device_mesh", None), f"parameter {name}")


def _refuse_mesh(mesh: Any, what: str) -> None:
    for group in mesh.get_all_groups():
        if not isinstance(group, SwapGroup):
            raise UsageError(
                f'protect(): {what} is spread over a "{dist.get_backend(group)}" group, which cannot be rebuilt in place: make the mesh '
                'after init_process_group("ftrun")',
                explain="F302",
            )
