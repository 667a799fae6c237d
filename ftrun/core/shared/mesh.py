"""Describes the place of a rank on the device mesh of its script, for people; no decision reads it.

Only a rank whose parameters are distributed over a mesh, or that named a mesh in `protect(replicas=...)`, has such a place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MeshPlace:
    """A rank's place: the size (in ranks) of each dimension of the mesh, the outer ones first, and this rank's index in it."""

    sizes: dict[str, int]
    at: dict[str, int]


def shape(sizes: Mapping[str, int]) -> str:
    """Format a mesh's sizes: `replicate 2 × shard 4`."""
    return " × ".join(f"{name} {size}" for name, size in sizes.items())


def words(at: Mapping[str, int] | None) -> str:
    """Format a rank's place: `replicate 1, shard 3`; "" for a rank without one."""
    return ", ".join(f"{name} {index}" for name, index in (at or {}).items())


def of_rank(rank: object, at: Mapping[str, int] | None) -> str:
    """Format a rank with its place: `rank 7 (replicate 1, shard 3)`."""
    return f"rank {rank} ({words(at)})" if at else f"rank {rank}"
