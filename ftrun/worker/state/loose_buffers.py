"""Buffers that take their shape while training: of observers, of modules that wait for their first input.

Memory that outlives the process cannot grow under a tensor. So these stay where torch made them, and their values are kept with
the Python state of the step. A buffer that is empty, or has one element in a dimension of its own, may grow in place; one of any
other shape may be replaced by one of another shape, and is kept here from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Place = tuple[str, torch.nn.Module, str]  # name in the manifest, module and attribute


class LooseBuffers:
    """`home` puts one that was replaced back into the arena, when a step goes back to before that."""

    def __init__(self, buffers: Iterable[Place], home: Callable[[str], object]) -> None:
        self._places = {name: (module, attribute) for name, module, attribute in buffers}
        self._from_the_first = frozenset(name for name in self._places if _may_grow(self._of(name)))
        self._replaced: set[str] = set()
        self._home = home

    def fixed(self) -> list[Place]:
        """The others."""
        return [(n, m, a) for n, (m, a) in self._places.items() if n not in self._from_the_first]

    def now(self) -> list[Place]:
        """Those that are kept here now."""
        return [(n, m, a) for n, (m, a) in self._places.items() if n in self]

    def __contains__(self, name: str) -> bool:
        return name in self._from_the_first or name in self._replaced

    def take(self, name: str) -> None:
        """The script gave it another shape or type."""
        self._replaced.add(name)

    def _of(self, name: str) -> Any:
        module, attribute = self._places[name]
        return getattr(module, attribute)

    def state_dict(self) -> dict[str, Any]:
        if not self._from_the_first and not self._replaced:
            return {}
        # copies: whoever looks at a tensor's bytes by numpy() fixes the size of its memory
        return {name: self._of(name).detach().clone() for name in self._places if name in self}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name in self._replaced - set(saved):
            self._home(name)
        self._replaced = set(saved) - self._from_the_first
        for name, value in saved.items():
            self._of(name).data = value.clone()


def _may_grow(buffer: torch.Tensor) -> bool:
    return buffer.numel() == 0 or (buffer.numel() == 1 and buffer.dim() > 0)
