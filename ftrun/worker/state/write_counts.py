"""How often tensors were written in place: tells a write also where it left the values as they were (a clamp that did not bite)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ftrun.worker.runtime.sharded_private import local_of
from ftrun.worker.runtime.torch_private import writes_to


def of_tensors(tensors: Iterable[Any]) -> list[tuple[int, int]]:
    """Of each, and of a rank's part of it. Writes through `.data` are counted nowhere."""
    return [(_count(one), _count(local_of(one))) for one in tensors]


def of_state(optimizers: Iterable[torch.optim.Optimizer]) -> list[tuple[int, int]]:
    """Of the tensors in the optimizers' state."""
    kept = (state for optimizer in optimizers for state in optimizer.state.values() if isinstance(state, Mapping))
    return of_tensors(one for state in kept for one in state.values() if isinstance(one, torch.Tensor))


def _count(tensor: Any) -> int:
    return -1 if tensor is None or tensor.is_inference() else writes_to(tensor)
