"""Find the device mesh that a script laid over its ranks, from the arguments of `protect`. It is only displayed; nothing depends on it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from ftrun.core.shared.mesh import MeshPlace
from ftrun.core.shared.notes import MeshNote
from ftrun.worker.link.run_link import Context
from ftrun.worker.state.shards import is_spread

_UNNAMED = "replicas"  # name of the dimension, if `replicas=` got a mesh without names


def show_mesh(context: Context, params: Iterable[Any], replicas: Any) -> None:
    """Leave the launcher a note with this rank's place on its mesh (see `place_of`)."""
    place = place_of(params, replicas, dist.get_world_size()) if dist.is_initialized() else None
    if place is not None:
        context.note(MeshNote(context.cell.index, place))


def place_of(params: Iterable[Any], replicas: Any, world_size: int) -> MeshPlace | None:
    """Return the place of this rank on its mesh.

    The mesh is the one with the most dimensions that a DTensor among `params` is spread over. Parallelism written by hand beside it,
    as in `protect(replicas=mesh["dp"])`, adds an outer dimension.

    Args:
        params: Parameters; those that are no DTensors are on no mesh.
        replicas: The argument of protect(): a DeviceMesh, or something else.
        world_size: Number of ranks of the run, the most that a mesh can have.

    Returns:
        The place; None if this rank is on no mesh.
    """
    meshes: dict[int, Any] = {id(param.device_mesh): param.device_mesh for param in params if is_spread(param)}
    inner = max((on_mesh(m) for m in meshes.values()), key=lambda p: (len(p.sizes), math.prod(p.sizes.values())), default=NOWHERE)
    outer = on_mesh(replicas) if hasattr(replicas, "get_coordinate") else NOWHERE
    if list(outer.sizes) == ["dim 0"]:
        outer = MeshPlace({_UNNAMED: outer.sizes["dim 0"]}, {_UNNAMED: outer.at["dim 0"]})
    sizes, at = {**outer.sizes, **inner.sizes}, {**outer.at, **inner.at}
    if not sizes:
        return None
    if outer.sizes.keys() <= inner.sizes.keys() or math.prod(sizes.values()) > world_size:  # `replicas` adds no dimension
        return inner if inner.sizes else outer
    return MeshPlace(sizes, at)


NOWHERE = MeshPlace({}, {})


def on_mesh(device_mesh: Any) -> MeshPlace:
    """Return the place of this rank on a DeviceMesh; NOWHERE if it is outside."""
    here = device_mesh.get_coordinate()
    if here is None:
        return NOWHERE
    names = device_mesh.mesh_dim_names or [f"dim {i}" for i in range(len(here))]
    sizes = dict(zip(names, map(int, device_mesh.shape), strict=True))
    return MeshPlace(sizes, dict(zip(names, map(int, here), strict=True)))
