"""Places inside a forward and a backward where a healthy rank notices that the world stops, and shows that it lives.

Without them a rank would go on computing until its next collective. A few hooks, spread evenly, cost microseconds a
step; compiled modules get none, since a hook would be traced into them.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ftrun.worker.context import Interrupt
from ftrun.worker.engine import Engine

_PLACES = 8  # hooks in each direction at the most

T = TypeVar("T")


def look_out(engine: Engine, modules: list[torch.nn.Module]) -> None:
    """Install the hooks on the parameters (backward) and submodules (forward) of `modules`."""
    context = engine.context

    def look(*_: Any) -> None:
        context.progress()
        if context.in_body and not engine.passed and not engine.registry.local and context.stop_pending():
            raise Interrupt

    for root in modules:
        inner = list(root.modules())
        if any(type(m).__name__ == "OptimizedModule" for m in inner):
            continue
        for param in _spread([p for p in root.parameters() if p.requires_grad]):
            param.register_hook(look)
        for module in _spread([m for m in inner if next(m.parameters(recurse=False), None) is not None]):
            module.register_forward_pre_hook(look)


def _spread(items: list[T]) -> list[T]:
    if len(items) <= _PLACES:
        return items
    return [items[i * len(items) // _PLACES] for i in range(_PLACES)]
