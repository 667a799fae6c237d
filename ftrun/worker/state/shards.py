"""Sharded parameters and optimizer state: which memory is a rank's part of them, and which other ranks hold the same part.

The arena holds a DTensor's part on this rank. FSDP2 gathers a parameter from a flat tensor that is padded to the same length on every
rank, so the arena holds that tensor. The manifest records the mesh and the placements.
"""

from __future__ import annotations

from typing import Any

import torch

from ftrun.core.errors import UsageError
from ftrun.worker.torch_compat import sharded_private
from ftrun.worker.torch_compat.sharded_private import local_of, set_local

_SAME = "as its parameter"  # the usual spread of optimizer state


def is_spread(tensor: Any) -> bool:
    """Is it a DTensor?"""
    kind = sharded_private.dtensor_class()
    return kind is not None and isinstance(tensor, kind)


class Shards:
    """FSDP2's records of some modules. A model without FSDP2 has none, and its parameters are kept as they are."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self.states = [state for module in modules for state in sharded_private.fsdp_states(module)]
        sharded_private.begin_fsdp(self.states)
        self._records = {id(param): record for param, record in sharded_private.fsdp_params(self.states)}

    def memory(self, param: torch.Tensor) -> torch.Tensor:
        """Return the tensor that holds all of a parameter's values on this rank."""
        record = self._records.get(id(param))
        return local_of(param) if record is None else sharded_private.padded_memory(record)

    def point(self, param: torch.nn.Parameter, view: torch.Tensor) -> None:
        """Let a parameter lie in `view`, which has the shape of its `memory`."""
        record = self._records.get(id(param))
        if record is not None:
            sharded_private.point_shard(record, view)
        elif is_spread(param):
            set_local(param, view)
        else:
            param.data = view


def holders(param: Any) -> frozenset[int]:
    """Return the global ranks that hold the same part of a DTensor as this one, by its placements; none for another tensor."""
    if not is_spread(param):
        return frozenset()
    mesh, here = param.device_mesh, param.device_mesh.get_coordinate()
    if here is None:
        return frozenset()
    place = tuple(
        slice(None) if placement.is_replicate() else index
        for placement, index in zip(param.placements, here, strict=True)
    )
    return frozenset(mesh.mesh[place].flatten().tolist())


def spread_of(param: Any) -> list[Any] | None:
    """Return for the manifest a DTensor's placements, whole shape, and mesh shape; None for another tensor."""
    if not is_spread(param):
        return None
    return [[str(p) for p in param.placements], list(param.shape), list(param.device_mesh.shape)]


def spread_of_state(value: Any, param: Any, name: str) -> list[Any] | None:
    """Return the same for optimizer state of `param`, so that `spread` can make it again.

    Raises:
        UsageError: If ftrun cannot keep a state that is spread this way.
    """
    if not is_spread(value):
        return None
    if not is_spread(param) or value.device_mesh != param.device_mesh:
        raise UsageError(f"{name} is spread over another mesh than its parameter, which ftrun cannot keep")
    how: Any = _SAME
    if tuple(value.placements) != tuple(param.placements):
        how = ["R" if p.is_replicate() else getattr(p, "dim", None) for p in value.placements]
        if any(type(p).__name__ not in ("Replicate", "Shard") for p in value.placements):
            raise UsageError(f"{name} is spread as {list(value.placements)}, which ftrun cannot keep")
    return [how, list(value.shape), list(value.stride())]


def spread(view: torch.Tensor, said: list[Any] | None, param: Any) -> torch.Tensor:
    """Make optimizer state of `param` over its part `view`, from the result of `spread_of_state`; for None return the part itself."""
    if said is None:
        return view
    how, shape, stride = said
    return _over(view, param, param.placements if how == _SAME else _placements(how), shape, stride)


def empty(said: list[Any], param: Any, dtype: torch.dtype) -> torch.Tensor:
    """Allocate such state over this world; `spread_of_state` may have run in another world."""
    from torch.distributed import tensor

    how, shape, _ = said
    if how == _SAME and shape == list(param.shape):
        return torch.empty_like(param, dtype=dtype)
    return tensor.empty(
        shape, dtype=dtype, device_mesh=param.device_mesh, placements=param.placements if how == _SAME else _placements(how)
    )


def like(part: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Make a gradient of `param` whose part on this rank is `part`."""
    return _over(part, param, param.placements, param.shape, param.stride()) if is_spread(param) else part


def _over(part: torch.Tensor, param: Any, placements: Any, shape: Any, stride: Any) -> torch.Tensor:
    made: Any = sharded_private.dtensor_class()
    with torch.no_grad():
        whole: torch.Tensor = made.from_local(
            part, param.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )
    set_local(whole, part)  # from_local takes an alias of it
    return whole


def _placements(how: list[Any]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if dim == "R" else Shard(dim) for dim in how]
