"""The place of a rank on the device mesh that its script lays over all ranks, in words.

For people; decides nothing. Only ranks whose parameters are spread over a mesh, or that named one in `protect(replicas=...)`, have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MeshPlace:
    """A rank's place: for each dimension of the mesh, the outer ones first, its size (in ranks) and this rank's index."""

    sizes: dict[str, int]
    at: dict[str, int]


def shape(sizes: Mapping[str, int]) -> str:
    """replicate 2 × shard 4."""
    return " × ".join(f"{name} {size}" for name, size in sizes.items())


def words(at: Mapping[str, int] | None) -> str:
    """replicate 1, shard 3; "" for a rank that has none."""
    return ", ".join(f"{name} {index}" for name, index in (at or {}).items())


def of_rank(rank: object, at: Mapping[str, int] | None) -> str:
    """rank 7 (replicate 1, shard 3)."""
    return f"rank {rank} ({words(at)})" if at else f"rank {rank}"
