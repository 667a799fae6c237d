"""Places inside a forward and a backward where a healthy rank notices that the world stops, and shows that it lives.

Without them a rank would go on computing until its next collective. A hook finds its code and data out of the caches and
costs some 10 us, so there are only as many as a step needs to be looked at every few milliseconds; compiled modules get
none, since a hook would be traced into them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ftrun.worker.runtime.run_link import Context, Interrupt

if TYPE_CHECKING:
    from ftrun.worker.engine import Engine

_PLACES = 8  # hooks in each direction of a module at the most
_EVERY = 0.020  # seconds between two of them
LEARNED = 4  # bodies after which a step's length is known; the first ones are longer

T = TypeVar("T")


class Lookout:
    """The hooks on the parameters (backward) and submodules (forward) of a worker's modules."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._hooks: list[Any] = []
        self._begun: list[float] = []

    def install(self, engine: Engine, modules: list[torch.nn.Module]) -> None:
        """Once, when the state is protected."""
        context = self._context

        def look(*_: Any) -> None:
            context.progress()
            if context.stop_pending() and context.in_body and not engine.passed and not engine.registry.local:
                raise Interrupt

        for root in modules:
            inner = list(root.modules())
            if any(type(m).__name__ == "OptimizedModule" for m in inner):
                continue
            layers = [m for m in inner if next(m.parameters(recurse=False), None) is not None]
            self._hooks += [m.register_forward_pre_hook(look) for m in _spread(layers, _PLACES)]
            params = [p for p in root.parameters() if p.requires_grad]
            self._hooks += [p.register_hook(look) for p in _spread(params, _PLACES)]

    def body_begins(self, number: int) -> None:
        """Body `number` (1 to LEARNED) of this process begins: of these it learns how many hooks are enough."""
        self._begun.append(time.monotonic())
        if number == LEARNED:
            step = min(b - a for a, b in zip(self._begun, self._begun[1:], strict=False))
            kept = _spread(self._hooks, round(step / _EVERY))
            for hook in self._hooks:
                if hook not in kept:
                    hook.remove()
            self._hooks = kept


def _spread(items: list[T], most: int) -> list[T]:
    if len(items) <= most:
        return items
    return [items[i * len(items) // most] for i in range(most)]
