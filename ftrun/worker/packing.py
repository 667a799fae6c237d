"""Python state that is asked for three times a step and hardly ever changes: packed once, and again when it differs."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from ftrun.worker import codec

# what DDP remembers of the last forward: after one under no_sync() the next does not broadcast buffers
_DDP_FLAGS = ("require_forward_param_sync", "require_backward_grad_sync")
_flags_of = operator.attrgetter(*_DDP_FLAGS)


class Groups:
    """The hyperparameters of one optimizer, packed again only when one of them is another object.

    Plain values cannot change in place, so the same objects are the same values.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._seen: list[Any] = []
        self._packed = b""

    def packed(self, groups: list[dict[str, Any]], loose: dict[int, dict[str, Any]]) -> bytes:
        """Everything of `groups` but the parameters, and the `loose` state."""
        seen: list[Any] = []
        for group in groups:
            seen += group
            seen += group.values()
        if not loose and self._packed and len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen)):
            return self._packed
        plain = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        packed = codec.pack([plain, loose], self.name.replace(".", " "))
        fixed = not loose and all(codec.is_fixed(v) for g in plain for v in g.values())
        self._seen, self._packed = (seen, packed) if fixed else ([], b"")
        return packed


def has_flags(module: torch.nn.Module) -> bool:
    """Is it one that keeps DDP's flags?"""
    return all(hasattr(module, flag) for flag in _DDP_FLAGS)


def packed_flags(module: Any) -> bytes:
    """DDP's flags of a module that has them."""
    return _packed(*_flags_of(module))


@functools.lru_cache(maxsize=16)
def _packed(*flags: Any) -> bytes:
    return codec.pack(dict(zip(_DDP_FLAGS, flags, strict=True)), "DDP")
