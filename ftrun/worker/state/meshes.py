"""The device mesh that a script has laid over its ranks, as far as what `protect` was given shows it. For people; decides nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from ftrun.core.shared.mesh import MeshPlace
from ftrun.core.shared.notes import MeshNote
from ftrun.worker.link.run_link import Context
from ftrun.worker.state.shards import is_spread

_UNNAMED = "replicas"  # the dimension of a mesh without names that replicas= was given


def show_mesh(context: Context, params: Iterable[Any], replicas: Any) -> None:
    """Leave word of where this rank is, see `place_of`, for the launcher. Nothing depends on it."""
    place = place_of(params, replicas, dist.get_world_size()) if dist.is_initialized() else None
    if place is not None:
        context.note(MeshNote(context.cell.index, place))


def place_of(params: Iterable[Any], replicas: Any, world_size: int) -> MeshPlace | None:
    """Where this rank is on its mesh.

    That is the mesh of most dimensions that a DTensor among `params` is spread over. Parallelism that is written by hand beside it,
    as `protect(replicas=mesh["dp"])` says, is a dimension more, outside of the others.

    Args:
        params: Parameters; those that are no DTensors are on no mesh.
        replicas: What protect() was given by that name: a DeviceMesh, or something else.
        world_size: Ranks of the run, which a mesh cannot have more of.

    Returns:
        None for a rank that is on no mesh.
    """
    meshes: dict[int, Any] = {id(param.device_mesh): param.device_mesh for param in params if is_spread(param)}
    inner = max((on_mesh(m) for m in meshes.values()), key=lambda p: (len(p.sizes), math.prod(p.sizes.values())), default=NOWHERE)
    outer = on_mesh(replicas) if hasattr(replicas, "get_coordinate") else NOWHERE
    if list(outer.sizes) == ["dim 0"]:
        outer = MeshPlace({_UNNAMED: outer.sizes["dim 0"]}, {_UNNAMED: outer.at["dim 0"]})
    sizes, at = {**outer.sizes, **inner.sizes}, {**outer.at, **inner.at}
    if not sizes:
        return None
    if outer.sizes.keys() <= inner.sizes.keys() or math.prod(sizes.values()) > world_size:  # made of dimensions that are there
        return inner if inner.sizes else outer
    return MeshPlace(sizes, at)


NOWHERE = MeshPlace({}, {})


def on_mesh(device_mesh: Any) -> MeshPlace:
    """Where this rank is on a DeviceMesh; NOWHERE outside of it."""
    here = device_mesh.get_coordinate()
    if here is None:
        return NOWHERE
    names = device_mesh.mesh_dim_names or [f"dim {i}" for i in range(len(here))]
    sizes = dict(zip(names, map(int, device_mesh.shape), strict=True))
    return MeshPlace(sizes, dict(zip(names, map(int, here), strict=True)))
