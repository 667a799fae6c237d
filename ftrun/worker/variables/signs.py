"""Detect changes of values without a copy, by a sign: the position of an iterator or a file, or a digest of a large value.

The digest covers containers and objects of the script, but no objects of libraries, unless they have a state_dict(). The only code of
the script that runs is its state_dict(), and its own part of Python's copy protocol.
"""

from __future__ import annotations

import collections
import hashlib
import inspect
import io
import itertools
import operator
import os
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ftrun.core.paths import OWN_FILES
from ftrun.worker.link.callers import module_of
from ftrun.worker.link.trees import checksum
from ftrun.worker.torch_compat.frames_private import locals_of
from ftrun.worker.torch_compat.sharded_private import local_of
from ftrun.worker.torch_compat.torch_private import writes_to
from ftrun.worker.variables.copies import Copier, TooLarge
from ftrun.worker.variables.guarded_memory import GuardedMemory
from ftrun.worker.variables.spaces import is_open, of_the_script

_LARGEST = 256 << 20  # bytes; a larger value is most likely a data set, and its numbers are not read
_UNKNOWN = object()
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_MANY, _FEW = 20_000, 100
_BY_PROTOCOL = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, np.ndarray, np.generic)


def sign_of(value: Any, known: Mapping[int, str], memory: GuardedMemory | None, across: bool = False) -> bytes | None:
    """Return a sign that stays equal, within one process, as long as the value appears unchanged; None if nothing can be read.

    An iterator that does not tell its position gives another sign each time.

    Args:
        value: Any value of the script.
        known: As for `copies.copied`.
        memory: As for `copies.copied`.
        across: The sign is for comparison with another process's, so it leaves out whatever differs between processes.
    """
    file = _Digesting()
    try:
        _Signer(file, known, memory, across).dump(_ends(value))
    except Exception:  # too large, or raised by the script's own code
        return None
    return file.digest.digest()


def _ends(value: Any) -> Any:
    """Return a huge container's length and the elements at its ends, since all of it would take too long; other values as they are."""
    if not isinstance(value, list | tuple | dict | collections.deque | set | frozenset) or len(value) <= _MANY:
        return value
    if isinstance(value, set | frozenset):
        return len(value)
    parts = value.items() if isinstance(value, dict) else value
    return len(value), *itertools.islice(parts, _FEW), *itertools.islice(reversed(parts), _FEW)


class _Digesting(io.RawIOBase):
    def __init__(self) -> None:
        super().__init__()
        self.digest = hashlib.blake2b(digest_size=16)
        self._left = _LARGEST

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._left -= size
        if self._left < 0:
            raise TooLarge
        self.digest.update(data)
        return size


class _Sign:
    """Stands for an object in the digest; only the arguments count."""

    def __init__(self, *seen: Any) -> None: ...


class _Signer(Copier):
    def __init__(self, file: Any, known: Mapping[int, str], memory: GuardedMemory | None, across: bool) -> None:
        super().__init__(file, known, memory)
        self._across = across
        self._held: list[Any] = []  # keeps objects alive, since the memo goes by ids

    def reducer_override(self, thing: Any) -> Any:
        if id(thing) in self.known:
            return super().reducer_override(thing)
        if isinstance(thing, torch.Tensor):
            return _Sign, self._of_tensor(local_of(thing))
        if isinstance(thing, np.ndarray) and thing.nbytes > _LARGEST:
            return _Sign, (thing.shape,)
        seen = self._seen(thing)
        if seen is None:
            return super().reducer_override(thing)
        self._held.append(seen)
        return _Sign, (type(thing).__qualname__, *seen)

    def _seen(self, thing: Any) -> tuple[Any, ...] | None:
        """Return the parts of an object that count; None = take what the copy protocol gives."""
        if isinstance(thing, Iterator | io.IOBase):
            place = _place(thing)
            return ("" if place is _UNKNOWN and self._across else os.urandom(16) if place is _UNKNOWN else place,)
        if isinstance(thing, DataLoader):
            return thing.dataset, *(one for one in (thing.sampler, thing.batch_sampler) if not hasattr(one, "set_epoch"))
        if hasattr(type(thing), "cache_info"):
            return (tuple(thing.cache_info()),)
        if isinstance(thing, _BY_PROTOCOL) or is_open(thing):
            return None
        if isinstance(thing, torch.nn.Module):
            return thing.state_dict(), _own_attributes(thing), hooks_on(thing)
        if has_state_dict(thing):
            return (thing.state_dict(),)
        return None if _is_of_python(type(thing)) else ()

    def _of_tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        if tensor.layout is not torch.strided or tensor.is_meta:
            return (tuple(tensor.shape),)
        if not tensor.is_cpu or tensor.numel() * tensor.element_size() > _LARGEST:
            return tuple(tensor.shape), *(() if self._across else (tensor.data_ptr(), writes_to(tensor)))
        return tuple(tensor.shape), checksum(tensor)

    def stays(self, thing: Any) -> Any:
        return _Sign, (type(thing).__qualname__,)


def _is_of_python(kind: type) -> bool:
    return module_of(kind).partition(".")[0] in ("builtins", "collections", "functools", "types", "random", "array", "torch", "numpy")


def _place(iterator: Any) -> Any:
    """Return an iterator's position; `_UNKNOWN` if it does not tell."""
    if isinstance(iterator, io.IOBase):
        return _place_in_file(iterator)
    if inspect.isgenerator(iterator):
        frame = iterator.gi_frame
        if frame is None or iterator.gi_code.co_filename.startswith(OWN_FILES):
            return None
        return frame.f_lasti, dict(locals_of(frame))
    if of_the_script(type(iterator)):
        return dict(getattr(iterator, "__dict__", {}))
    left = operator.length_hint(iterator, -1) if module_of(type(iterator)) == "builtins" else -1
    return left if left >= 0 else _UNKNOWN


def _place_in_file(file: io.IOBase) -> Any:
    """Return the position in a file that is open for reading only; None for a file that is written, most likely a log."""
    if file.closed or file.writable() or not file.readable() or not file.seekable():
        return None
    try:
        return file.tell()
    except OSError:  # a text file, between two lines of an iteration
        return _UNKNOWN


def _own_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes that not every module has."""
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULES}


def hooks_on(module: torch.nn.Module) -> int:
    """Return how many hooks the script has registered on a module."""
    tables = [table for name, table in vars(module).items() if table and name.endswith("_hooks")]
    codes = [getattr(hook, "__code__", None) for table in tables for hook in table.values()]
    return sum(code is None or not code.co_filename.startswith(OWN_FILES) for code in codes)


def has_state_dict(value: Any) -> bool:
    """Has it a state_dict? Asks its class first: an object may answer to any name, and some raise other errors than AttributeError."""
    try:
        return hasattr(type(value), "state_dict") or hasattr(value, "state_dict")
    except Exception:
        return False


