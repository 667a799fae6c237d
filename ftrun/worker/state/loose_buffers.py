"""Buffers that take their shape while training, such as those of observers and of modules that wait for their first input.

Memory that outlives the process cannot grow under a tensor. So these buffers stay where torch made them, and their values are kept
with the Python state of the step. A buffer that is empty, or has one element in at least one dimension, may grow in place; the script
may also replace a buffer of any other shape by one of another shape, which is kept here from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

Place = tuple[str, torch.nn.Module, str]  # name in the manifest, module and attribute


class LooseBuffers:
    """The loose buffers of one rank. `home` puts a replaced buffer back into the arena when a step goes back to before that."""

    def __init__(self, buffers: Iterable[Place], home: Callable[[str], object]) -> None:
        self._places = {name: (module, attribute) for name, module, attribute in buffers}
        self._from_the_first = frozenset(name for name in self._places if _may_grow(self._of(name)))
        self._replaced: set[str] = set()
        self._home = home

    def fixed(self) -> list[Place]:
        """Return the buffers that are not loose from the first."""
        return [(n, m, a) for n, (m, a) in self._places.items() if n not in self._from_the_first]

    def now(self) -> list[Place]:
        """Return the buffers that are loose now."""
        return [(n, m, a) for n, (m, a) in self._places.items() if n in self]

    def __contains__(self, name: str) -> bool:
        return name in self._from_the_first or name in self._replaced

    def take(self, name: str) -> None:
        """Keep a buffer here to which the script gave another shape or type."""
        self._replaced.add(name)

    def _of(self, name: str) -> Any:
        module, attribute = self._places[name]
        return getattr(module, attribute)

    def state_dict(self) -> dict[str, Any]:
        if not self._from_the_first and not self._replaced:
            return {}
        # copies, since a read of a tensor's bytes by numpy() fixes the size of its memory
        return {name: self._of(name).detach().clone() for name in self._places if name in self}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name in self._replaced - set(saved):
            self._home(name)
        self._replaced = set(saved) - self._from_the_first
        for name, value in saved.items():
            self._of(name).data = value.clone()


def _may_grow(buffer: torch.Tensor) -> bool:
    return buffer.numel() == 0 or (buffer.numel() == 1 and buffer.dim() > 0)
