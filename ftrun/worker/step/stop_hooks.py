"""Place hooks inside forward and backward, where a healthy rank notices that the world stops, and shows that it lives.

Without them a rank would go on computing until its next collective. A hook finds its code and data out of the caches and
costs some 10 us, so there are only as many as suffice for a look every 20 ms. torch.compile leaves those in a forward
out of what it compiles.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

import torch

from ftrun.core.shared.board import F
from ftrun.core.traced_away import traced_away
from ftrun.worker.comm.process_group import Registry
from ftrun.worker.link.compiling import has_compiled
from ftrun.worker.link.observer import StepObserver
from ftrun.worker.link.position import Interrupt, Where
from ftrun.worker.torch_compat import sharded_private

_PLACES = 8  # hooks in each direction of a module at the most
_EVERY = 0.020  # seconds between two of them
_LEARNED = 4  # bodies after which a step's length is known; the first ones are longer

T = TypeVar("T")


class StopHooks(StepObserver):
    """The hooks on the parameters (backward) and submodules (forward) of a worker's modules."""

    def __init__(self, registry: Registry, modules: list[torch.nn.Module]) -> None:
        self._forward: list[Any] = []
        self._backward: list[Any] = []
        self._begun: list[float] = []
        context, position = registry.context, registry.position
        words = context.cell.words()

        def look(*_: Any) -> None:
            words[F.PROGRESS] = time.monotonic_ns()
            if context.stop_pending() and position.where is Where.BODY and not registry.local:
                raise Interrupt

        for root in modules:
            if sharded_private.fsdp_states(root):
                continue  # it notices in each layer's collectives; a hook would cut a compiled part of it, and change bits
            inner = list(root.modules())
            if any(type(m).__name__ == "OptimizedModule" for m in inner):
                continue  # it may have been called already: torch would compile it anew
            layers = [m for m in inner if next(m.parameters(recurse=False), None) is not None]
            outside = traced_away(torch.compiler.is_compiling, look)
            self._forward += [m.register_forward_pre_hook(outside) for m in _spread(layers, _PLACES)]
            params = [p for p in root.parameters() if p.requires_grad]
            self._backward += [p.register_hook(look) for p in _spread(params, _PLACES)]

    def body_started(self) -> None:
        """Measure the first bodies of this process, and remove hooks that they do not need.

        Those in a forward stay where torch has compiled something: it would compile a module anew that has other hooks.
        """
        self._begun.append(time.monotonic())
        if len(self._begun) == _LEARNED:
            step = min(b - a for a, b in zip(self._begun, self._begun[1:], strict=False))
            hooks = self._backward if has_compiled() else self._forward + self._backward
            kept = _spread(hooks, round(step / _EVERY))
            for hook in hooks:
                if hook not in kept:
                    hook.remove()
            self.told_by.ignore("body_started", self)


def _spread(items: list[T], most: int) -> list[T]:
    if len(items) <= most:
        return items
    return [items[i * len(items) // most] for i in range(most)]
