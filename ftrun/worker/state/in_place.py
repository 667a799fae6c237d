"""What is changed in place while copies are put back: each thing takes the value of one part of them.

Two parts may be found at the same thing: two names of a replacement's script may be bound to one list, where its predecessor's had two by
then. Two arrays may lie over the same memory. The second one is made anew there, so that it does not write over the first.
"""

from __future__ import annotations

import array
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from ftrun.worker.state import serialization
from ftrun.worker.state.guarded_memory import GuardedMemory

ARRAYS = (torch.Tensor, np.ndarray, bytearray, array.array)


class InPlace:
    """Of all copies that are put back together.

    Attributes:
        memory: What the job guards; nothing is written there.
        apart: Ids of things that are left as they are: copies have them by name, or names hold them together here that had things of
            their own when they were copied.
        taken: Id -> thing that was changed.
    """

    def __init__(self, memory: GuardedMemory | None = None) -> None:
        self.memory = memory
        self.apart: Collection[int] = ()
        self.taken: dict[int, Any] = {}
        self._written: dict[int, list[tuple[Any, bytes]]] = {}  # memory -> arrays over it, and what they are to hold

    def array(self, there: Any, new: Any) -> Any:
        """`there` (or None), changed to hold what `new` does; `new` where that cannot be."""
        if self.memory is not None:
            over = self.memory.over(new)
            if over is not None:
                return there if self.memory.over(there) == over and layout(there) == layout(new) else new
            if self.memory.over(there) is not None:
                return new
        if there is None or not _fits(there, new):
            return new
        if isinstance(there, torch.Tensor) and not serialization.takes(there):
            _write(there, new)
            return there
        others = self._written.setdefault(_memory_of(there), [])
        before = _like(there) if others else None
        _write(there, new)
        if any(_bytes(other) != held for other, held in others):
            _write(there, before)
            return new
        others.append((there, _bytes(there)))
        return there


def layout(thing: Any) -> tuple[str, list[int], list[int], bool, bool]:
    """Of a tensor or an array: type of its elements, shape, strides, does it want a gradient, is it a parameter?"""
    if isinstance(thing, np.ndarray):
        return thing.dtype.str, list(thing.shape), list(thing.strides), False, False
    return str(thing.dtype), list(thing.shape), list(thing.stride()), thing.requires_grad, isinstance(thing, torch.nn.Parameter)


def _memory_of(thing: Any) -> int:
    """What stands for the memory that an array lies in, with all others that lie there."""
    if isinstance(thing, torch.Tensor):
        return thing.untyped_storage().data_ptr() if thing.layout is torch.strided else id(thing)
    while isinstance(thing, np.ndarray) and isinstance(thing.base, np.ndarray):
        thing = thing.base
    return int(thing.ctypes.data) if isinstance(thing, np.ndarray) else id(thing)


def _fits(there: Any, new: Any) -> bool:
    if isinstance(new, torch.Tensor):
        kinds = [(one.shape, one.dtype, one.device, one.layout) for one in (there, new)]
        return kinds[0] == kinds[1]
    if isinstance(new, np.ndarray):
        return bool(there.shape == new.shape and there.dtype == new.dtype and there.flags.writeable)
    return not isinstance(new, array.array) or there.typecode == new.typecode


def _write(there: Any, new: Any) -> None:
    if isinstance(there, torch.Tensor):
        with torch.no_grad():
            there.copy_(new)
        if there.is_leaf:
            there.requires_grad_(new.requires_grad)
    elif isinstance(there, np.ndarray):
        np.copyto(there, new)
    else:
        there[:] = new


def _like(thing: Any) -> Any:
    """One of its own with the same values."""
    if isinstance(thing, torch.Tensor):
        return thing.detach().clone().requires_grad_(thing.requires_grad)
    return thing.copy() if isinstance(thing, np.ndarray) else thing[:]


def _bytes(thing: Any) -> bytes:
    if isinstance(thing, torch.Tensor):
        return serialization.pack(thing.detach(), "a tensor")
    return bytes(thing) if isinstance(thing, bytearray) else thing.tobytes()
