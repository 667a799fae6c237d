"""Change objects in place while copies are put back: each object takes the value of one part of the copies.

Two parts may meet at one object: two names of a replacement's script may be bound to one list, where its predecessor's had two by
then. Two arrays may lie over the same memory. The second part then becomes a new object, so that it does not overwrite the first.
"""

from __future__ import annotations

import array
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from ftrun.worker.memory import serialization
from ftrun.worker.variables.guarded_memory import GuardedMemory

ARRAYS = (torch.Tensor, np.ndarray, bytearray, array.array)


class InPlace:
    """Shared by all copies that are put back together.

    Attributes:
        memory: The memory that the job guards; nothing is written there.
        apart: Ids of objects that are left as they are: copies hold them by name, or several names share them here that had
            objects of their own when they were copied.
        taken: Id -> object that was changed.
    """

    def __init__(self, memory: GuardedMemory | None = None) -> None:
        self.memory = memory
        self.apart: Collection[int] = ()
        self.taken: dict[int, Any] = {}
        self._written: dict[int, list[tuple[Any, bytes]]] = {}  # memory -> arrays over it, and the bytes they hold

    def array(self, there: Any, new: Any) -> Any:
        """Change `there` (or None) to hold the values of `new`, and return it; return `new` where that is impossible."""
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
    """Return the element type, shape and strides of a tensor or an array; does it require a gradient, and is it a parameter?"""
    if isinstance(thing, np.ndarray):
        return thing.dtype.str, list(thing.shape), list(thing.strides), False, False
    return str(thing.dtype), list(thing.shape), list(thing.stride()), thing.requires_grad, isinstance(thing, torch.nn.Parameter)


def _memory_of(thing: Any) -> int:
    """Return a number that all arrays over the same memory have in common."""
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
    """Return a copy in memory of its own."""
    if isinstance(thing, torch.Tensor):
        return thing.detach().clone().requires_grad_(thing.requires_grad)
    return thing.copy() if isinstance(thing, np.ndarray) else thing[:]


def _bytes(thing: Any) -> bytes:
    if isinstance(thing, torch.Tensor):
        return serialization.pack(thing.detach(), "a tensor")
    return bytes(thing) if isinstance(thing, bytearray) else thing.tobytes()
