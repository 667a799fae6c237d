"""Where a rank is on the device mesh that its script lays over all ranks: the file that a worker leaves for the launcher, and words.

For people; decides nothing. Only ranks whose parameters are spread over a mesh, or that named one in `protect(replicas=...)`, have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ftrun.core.shape import listed, row, text, whole
from ftrun.core.system import files

_DIMENSIONS = listed(row(text, whole, whole))


class MeshPlace(NamedTuple):
    """By the names of the mesh's dimensions, the outer ones first: how many ranks each has, and which of them this one is."""

    sizes: dict[str, int]
    at: dict[str, int]


def file_name(cell: int) -> str:
    """Without folder and suffix, see Context.report."""
    return f"mesh-{cell}"


def to_file(place: MeshPlace) -> dict[str, object]:
    """What the file holds."""
    return {"mesh": [[name, place.at[name], size] for name, size in place.sizes.items()]}


def read(run_dir: Path, cell: int) -> MeshPlace | None:
    """Where the worker in `cell` has said that it is; None without a file, or with a damaged one."""
    told = files.read_json(run_dir / "errors" / f"{file_name(cell)}.json").get("mesh")
    if not told or not _DIMENSIONS(told):
        return None
    return MeshPlace({name: size for name, _, size in told}, {name: index for name, index, _ in told})


def shape(sizes: Mapping[str, int]) -> str:
    """replicate 2 × shard 4."""
    return " × ".join(f"{name} {size}" for name, size in sizes.items())


def words(at: Mapping[str, int] | None) -> str:
    """replicate 1, shard 3; "" for a rank that has none."""
    return ", ".join(f"{name} {index}" for name, index in (at or {}).items())


def of_rank(rank: object, at: Mapping[str, int] | None) -> str:
    """rank 7 (replicate 1, shard 3)."""
    return f"rank {rank} ({words(at)})" if at else f"rank {rank}"
