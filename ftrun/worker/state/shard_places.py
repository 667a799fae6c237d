"""Describe which part of a whole tensor a DTensor holds on this rank, and where on its mesh, for people to read."""

from __future__ import annotations

from typing import Any

from ftrun.worker.state.meshes import on_mesh
from ftrun.worker.state.shards import is_spread
from ftrun.worker.torch_compat.sharded_private import local_of


def shard_place(tensor: Any) -> dict[str, Any] | None:
    """Describe this rank's part of a DTensor; return None for another tensor, and for a rank outside of its mesh.

    Returns:
        `at`: the index on each dimension of the mesh, by name. `cuts`: for each dimension of the tensor that is cut into shards its
        number `dim`, the number `shard` of this shard among `shards`, from 0, its rows `first` to `end` - 1, and the `size` of the
        whole. `first` and `end` are null if the shards do not lie one after the other. `sums`: the values are partial sums, still to
        be summed over the mesh or a part of it.
    """
    if not is_spread(tensor):
        return None
    place = on_mesh(tensor.device_mesh)
    if not place.at:
        return None
    local, cuts = local_of(tensor).shape, []
    for dim in sorted({d for d in map(_dim, tensor.placements) if d is not None}):
        over = list(zip(tensor.placements, place.at.values(), place.sizes.values(), strict=True))
        # FSDP2 cuts the shards of tensor parallelism, although its dimension of the mesh is the outer one
        inner = [(i, n) for p, i, n in over if _dim(p) == dim and not hasattr(p, "split_factor")]
        outer = [(i, n) for p, i, n in over if _dim(p) == dim and hasattr(p, "split_factor")]
        cuts.append(_cut(dim, [*inner, *outer], int(tensor.shape[dim]), int(local[dim])))
    return {"at": place.at, "cuts": cuts, "sums": any(p.is_partial() for p in tensor.placements)}


def _dim(placement: Any) -> int | None:
    """Return the dimension of the tensor that a placement cuts; None if it cuts none."""
    dim = None if placement.is_replicate() or placement.is_partial() else getattr(placement, "dim", None)
    return None if dim is None else int(dim)


def _cut(dim: int, order: list[tuple[int, int]], size: int, here: int) -> dict[str, Any]:
    """Describe how a dimension is cut. `order`: index and number of shards for each cut; `here`: length of this part."""
    first, end, shard, shards = 0, size, 0, 1
    for index, number in order:
        chunk = -(-(end - first) // number)
        first, end = min(first + index * chunk, end), min(first + (index + 1) * chunk, end)
        shard, shards = shard * number + index, shards * number
    known = end - first == here
    return {
        "dim": dim, "shard": shard, "shards": shards, "first": first if known else None, "end": end if known else None, "size": size,
    }  # fmt: skip
