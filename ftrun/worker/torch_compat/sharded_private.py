"""Private names of DTensor and of FSDP2 (`fully_shard`), beside the functions that use them; see torch_private.py for the rules.

FSDP2 keeps a state of its own beside the parameters: which of them are gathered, which communication is under way, which gradients
are not reduced yet. torch's `reset_iter_state` resets it after a step was cut off, but leaves gradients behind, and the step done
again ends on other bits. `reset_fsdp` does the rest.
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Iterator
from typing import Any

from ftrun.worker.torch_compat.torch_private import Private

SHARDED = "protect of sharded models"  # without it protect() refuses a model whose parameters are DTensors

_FSDP = "torch.distributed.fsdp._fully_shard"
_TENSOR = "torch.distributed.tensor"


# ---- DTensor ----


def dtensor_class() -> Any:
    """Return `DTensor` if it is imported, else None: without the import, which takes a second, there is no DTensor."""
    return getattr(sys.modules.get(_TENSOR), "DTensor", None)


def local_of(tensor: Any) -> Any:
    """Return the tensor that holds this rank's part of a DTensor, of which `to_local` returns an alias; any other value itself."""
    kind = dtensor_class()
    return tensor._local_tensor if kind is not None and isinstance(tensor, kind) else tensor


_local = operator.attrgetter("_local_tensor")


def locals_of(tensors: list[Any]) -> list[Any]:
    """Return `local_of` each tensor; None for None."""
    kind = getattr(sys.modules.get(_TENSOR), "DTensor", None)
    if kind is not None and {*map(type, tensors)} == {kind}:
        return list(map(_local, tensors))
    return [one._local_tensor if kind is not None and isinstance(one, kind) else one for one in tensors]


def set_local(tensor: Any, part: Any) -> None:
    """Set the tensor that holds a DTensor's part on this rank, as FSDP2 does when it pads one."""
    tensor._local_tensor = part


# ---- FSDP2 ----


def fsdp_states(module: Any) -> list[Any]:
    """Return FSDP2's states of a module and its submodules, each once, outer ones first."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    found: dict[int, Any] = {}
    for part in module.modules() if kind is not None else ():
        if isinstance(part, kind):
            state = part._get_fsdp_state()
            found[id(state)] = state
    return list(found.values())


def begin_fsdp(states: list[Any]) -> None:
    """Do the first forward's set-up: select the root, and pad the parameters."""
    for state in states:
        if state._is_root is None:
            state._lazy_init()


def groups_of(state: Any) -> list[Any]:
    """Return a state's parameter groups, each of which is gathered and reduced together."""
    return list(state._fsdp_param_groups)


def fsdp_params(states: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield (sharded parameter, FSDP2's record of it)."""
    for state in states:
        for group in groups_of(state):
            for record in group.fsdp_params:
                yield record.sharded_param, record


def padded_memory(record: Any) -> Any:
    """Return the flat tensor, padded to one length on every rank, from which FSDP2 gathers a parameter. The shard lies at its start."""
    return record._sharded_param_data


def point_shard(record: Any, flat: Any) -> None:
    """Let the shard and its padded memory lie in `flat`, which is as long as `padded_memory`."""
    dim, size = record.fsdp_placement.dim, record.padded_sharded_param_size
    part = flat.view(size)
    if part.shape != record.sharded_size:
        part = part.narrow(dim, 0, record.sharded_size[dim] if record.sharded_size.numel() else 0)
    record._sharded_param_data = flat
    set_local(record.sharded_param, part)


def reset_fsdp(states: list[Any]) -> None:
    """Forget a forward or backward that was cut off: leave no parameter gathered, and no unreduced gradient.

    This does not wait: the communication belonged to a stopped world, and is over (see `Registry.drain`).
    """
    for state in states:
        state._comm_ctx.all_gather_state = None
        for group in groups_of(state):
            group._all_gather_result = None
            for record in group.fsdp_params:
                record.to_sharded()  # one by one: the group's state may be ahead of some of its parameters
                if hasattr(record, "_unsharded_param"):
                    record._unsharded_param.grad = None
                if "unsharded_accumulated_grad" in vars(record):  # from torch 2.15 on it is the gradient above
                    record.unsharded_accumulated_grad = None
                record.grad_offload_event = None
                record._sharded_post_forward_param = record._sharded_post_forward_param_data = None
            group._sharded_state = _sharded()
    # from torch 2.15 on `_reset_iter_state` also drops reduced gradients, but those from before the step must stay
    reduced = [(param, param.grad) for param, _ in fsdp_params(states)]
    for state in states:
        if state._is_root:
            state._reset_iter_state()
    for param, grad in reduced:
        param.grad = grad


def _sharded() -> Any:
    return importlib.import_module(f"{_FSDP}._fsdp_param").ShardedState.SHARDED


def unreduced(states: list[Any]) -> str:
    """Return the name of a parameter whose gradient a later backward has to reduce; "" if there is none."""
    for state in states:
        for group in groups_of(state):
            if group._partial_reduce_output is not None:
                return str(group._module_fqn or "the root module's parameters")
            for record in group.fsdp_params:
                whole = getattr(record, "_unsharded_param", None)
                if record.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                    return str(record._param_fqn)
    return ""


def fsdp_extras(state: Any) -> Iterator[str]:
    """Yield in words what a script has put into FSDP2 in place of torch's own."""
    api = importlib.import_module(f"{_FSDP}._fsdp_collectives")
    for group in groups_of(state):
        if type(group.offload_policy).__name__ != "OffloadPolicy":
            yield f"fully_shard(offload_policy={type(group.offload_policy).__name__}(...))"
        if type(group._all_gather_comm) is not api.DefaultAllGather:
            yield "set_custom_all_gather(...), or another all-gather than torch's default"
        if type(group._reduce_scatter_comm) is not api.DefaultReduceScatter:
            yield "set_custom_reduce_scatter(...), or another reduce-scatter than torch's default"
        if group._all_reduce_hook is not None:
            yield "set_all_reduce_hook(...)"


NAMES = [
    Private(
        f"{_TENSOR}:DTensor", ("_local_tensor",), "torch", SHARDED,
        "keep this rank's part of a sharded tensor in memory that outlives the worker",
        "a replaced rank's shard is lost", of_instance=True,
    ),
    Private(
        f"{_FSDP}._fully_shard:FSDPModule", ("_get_fsdp_state",), "torch", SHARDED,
        "find what FSDP2 keeps beside the parameters", "a step cannot be done again",
    ),
    Private(
        f"{_FSDP}._fsdp_state:FSDPState", ("_lazy_init", "_reset_iter_state"), "torch", SHARDED,
        "pad the shards before they are moved, and make FSDP2 forget a step that was cut off",
        "a step cannot be done again",
    ),
    Private(
        f"{_FSDP}._fsdp_state:FSDPState", ("_is_root", "_comm_ctx", "_fsdp_param_groups"), "torch", SHARDED,
        "reach every parameter that FSDP2 gathers", "a step done again ends on other bits", of_instance=True,
    ),
    Private(
        f"{_FSDP}._fsdp_param_group:FSDPParamGroup",
        ("_all_gather_result", "_sharded_state", "_partial_reduce_output", "_module_fqn"), "torch", SHARDED,
        "drop what was being gathered or reduced when a step was cut off", "a step done again ends on other bits",
        of_instance=True,
    ),
    Private(
        f"{_FSDP}._fsdp_param_group:FSDPParamGroup", ("_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook"),
        "torch", SHARDED, "refuse communication that the script has put in place of torch's",
        "what such code keeps from step to step is not put back", of_instance=True,
    ),
    Private(
        f"{_FSDP}._fsdp_param:FSDPParam",
        ("_sharded_param_data", "_unsharded_param", "_sharded_post_forward_param", "_sharded_post_forward_param_data",
         "_param_fqn"),
        "torch", SHARDED, "move a shard with its padding, and drop gradients that are not reduced",
        "a replaced rank's shard is lost, or a step done again sums gradients of the first try", of_instance=True,
    ),
]  # fmt: skip
