"""What stands for a live value of a script: something small that is equal as long as the value is, as far as can be seen.

It goes down into containers, closures, classes and objects of the script's own, and not into those of libraries, unless they
have a state_dict(). It runs no code of the script but that. What is the same in two processes has the same repr() in both:
`ftrun verify` compares those.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import inspect
import io
import operator
import os
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from ftrun.core.paths import OWN_FILES
from ftrun.worker.runtime import loader_private
from ftrun.worker.runtime.callers import is_script, module_of
from ftrun.worker.runtime.frames_private import locals_of
from ftrun.worker.runtime.sharded_private import local_of
from ftrun.worker.runtime.torch_private import writes_to
from ftrun.worker.runtime.trees import checksum
from ftrun.worker.state.protected_state import ProtectedState
from ftrun.worker.state.spaces import is_open, of_the_script

_ATOMS = (type(None), int, float, str, bytes, complex)
_DEEPEST = 100  # objects within one another
_BIG = 256 << 20  # bytes; what is larger is a data set, most likely, and its numbers are not read
_MANY, _ENDS = 20_000, 100  # elements of a container, above which as many at both ends are looked at
_OF_MODULES = frozenset(vars(torch.nn.Module()))


class Stand(NamedTuple):
    """Stands for a value that is no atom: a digest of what it holds."""

    digest: str


class Here(int):
    """An address or a hash: compared within a process, and no part of what two processes are compared by."""


class Unknown:
    """Stands for what cannot be seen: it is equal to nothing within a process, and no part of what two are compared by."""


class LiveValues:
    """`known`: ids of objects that stand for nothing, since they are guarded, or meant to stay out."""

    def __init__(self, state: ProtectedState, known: set[int]) -> None:
        self._state = state
        self._known = known
        self._across = False
        self._found: dict[
            int, tuple[Any, Any]
        ] = {}  # id -> the object, and what stands for it; in one look nothing changes
        self._under_way: set[int] = set()

    def look(self, across: bool = False) -> None:
        """Begin to look. `across`: what is found is compared with what another process finds."""
        self._across = across
        self._found.clear()
        self._under_way.clear()

    def of(self, value: Any) -> Any:
        """What stands for a value: itself, a Stand, or None for what is not looked into."""
        if isinstance(value, _ATOMS):
            return value
        key = id(value)
        if key in self._found:
            return self._found[key][1]
        if key in self._known or key in self._under_way or len(self._under_way) > _DEEPEST:
            return None
        self._under_way.add(key)
        try:
            stand = self._stand_for(value)
        finally:
            self._under_way.discard(key)
        self._found[key] = value, stand
        return stand

    def _stand_for(self, value: Any) -> Any:
        seen = self._seen(value)
        if seen is None:
            return None
        digest = hashlib.blake2b(digest_size=16)
        for piece in self._pieces(seen):
            digest.update(piece)
        return Stand(digest.hexdigest())

    def _pieces(self, seen: Any) -> Iterator[bytes]:
        """The bytes of something small, or of a dict or a list of what stands for its parts."""
        if isinstance(seen, dict):
            yield b"{%d" % len(seen)
            items = [(*self._pieces(_key(key)), *self._pieces(self.of(seen[key]))) for key in _ends(list(seen))]
            yield from sorted(b"".join(item) for item in items)  # whatever their order
        elif isinstance(seen, list):
            yield b"[%d" % len(seen)
            for part in _ends(seen):
                yield from self._pieces(self.of(part))
        elif isinstance(seen, Here):
            yield b"@" if self._across else b"@%d;" % int(seen)
        elif isinstance(seen, Unknown):
            yield b"?" if self._across else os.urandom(16)
        elif isinstance(seen, bytes):
            yield b"b%d;" % len(seen)
            yield seen
        elif isinstance(seen, tuple):
            yield b"(%d" % len(seen)
            for part in seen:
                yield from self._pieces(part)
        else:
            yield f"{type(seen).__name__} {seen!r};".encode(errors="surrogatepass")

    def _seen(self, value: Any) -> Any:
        """What is to be digested of a value; None for what is not looked into."""
        if isinstance(value, torch.Tensor):
            return self._tensor(local_of(value))
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return str(value.dtype), value.shape, value.tobytes() if value.nbytes <= _BIG else None
        if isinstance(value, torch.Generator):
            return self._tensor(value.get_state())
        if isinstance(value, random.Random):
            return repr(value.getstate())
        if isinstance(value, np.random.Generator | np.random.RandomState):
            return repr(value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state())
        return self._inner(value)

    def _inner(self, value: Any) -> Any:
        """What a value holds, in a dict or a list; or something small that stands for it."""
        if isinstance(value, dict):
            return value
        if isinstance(value, list | tuple | collections.deque | np.ndarray):
            return list(value)
        if isinstance(value, set | frozenset):
            few = len(value) <= _MANY and all(isinstance(part, _ATOMS) for part in value)
            return tuple(sorted(map(repr, value))) if few else Here(hash(frozenset(value)))
        if isinstance(value, DataLoader):
            return [value.dataset, *(s for s in (value.sampler, value.batch_sampler) if not hasattr(s, "set_epoch"))]
        if isinstance(value, functools.partial):
            return [value.func, value.args, value.keywords]
        if inspect.ismethod(value):
            return [value.__self__, value.__func__]
        if hasattr(type(value), "cache_info"):
            return list(value.cache_info())
        if inspect.isfunction(value):
            return _held_by(value) if is_script(value.__code__.co_filename) else None
        if inspect.isclass(value):
            return _public(vars(value)) if of_the_script(value) else None
        if isinstance(value, Iterator):
            return _place(value)
        if isinstance(value, torch.nn.Module):
            return [_state_of(value), attributes(value)]
        if has_state_dict(value):
            return [_state_of(value), self.attributes(value) if of_the_script(type(value)) else None]
        return self.attributes(value) if is_open(value) else None

    def attributes(self, value: Any) -> dict[str, Any]:
        """Of an object, without the epoch and the iterator of a loader or sampler that `job.batches` iterates."""
        found = attributes(value)
        own = {"epoch", *loader_private.OF_ITERATION} if id(value) in self._state.iterated else ()
        return {name: inner for name, inner in found.items() if name not in own}

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor.is_meta:
            return None
        segment = self._state.arena.segment
        if segment.address <= tensor.data_ptr() < segment.address + segment.length:
            return None
        if not tensor.is_cpu:
            return Here(tensor.data_ptr()), writes_to(tensor)
        if tensor.numel() * tensor.element_size() > _BIG:
            return tuple(tensor.shape), Here(tensor.data_ptr()), writes_to(tensor)
        return tuple(tensor.shape), checksum(tensor)


def _key(key: Any) -> Any:
    parts = key if type(key) is tuple else (key,)
    return key if all(isinstance(part, _ATOMS) for part in parts) else Here(hash(key))


def _ends(parts: list[Any]) -> list[Any]:
    return parts if len(parts) <= _MANY else [*parts[:_ENDS], *parts[-_ENDS:]]


def attributes(value: Any) -> dict[str, Any]:
    """Of an object; of those that every torch module has only how many hooks there are."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    found = {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if name[:2] != "__"}}
    if not isinstance(value, torch.nn.Module):
        return found
    hooks = [hook for k, v in found.items() if k in _OF_MODULES and k.endswith("_hooks") and v for hook in v.values()]
    return {**{k: v for k, v in found.items() if k not in _OF_MODULES}, "hooks": sum(not _is_ours(h) for h in hooks)}


def _is_ours(hook: Any) -> bool:
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_filename.startswith(OWN_FILES)


def _public(values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not name.startswith("__")}


def _held_by(function: Any) -> list[Any]:
    """What a function is made of, what it closes over, its defaults, and what was hung on it."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    return [Here(hash(function.__code__)), *cells, function.__defaults__, function.__kwdefaults__, vars(function)]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _place(iterator: Any) -> Any:
    """How far an iterator is; of one that does not say, something that is equal to nothing."""
    if isinstance(iterator, io.IOBase):
        return _place_in_file(iterator)
    if inspect.isgenerator(iterator):
        frame = iterator.gi_frame
        if frame is None or iterator.gi_code.co_filename.startswith(OWN_FILES):
            return None
        return [frame.f_lasti, dict(locals_of(frame))]
    if of_the_script(type(iterator)):
        return attributes(iterator)
    left = operator.length_hint(iterator, -1) if module_of(type(iterator)) == "builtins" else -1
    return left if left >= 0 else Unknown()


def has_state_dict(value: Any) -> bool:
    """Asked of its class first: an object may answer for any name, and some raise what is no AttributeError."""
    try:
        return hasattr(type(value), "state_dict") or hasattr(value, "state_dict")
    except Exception:
        return False


def _place_in_file(file: io.IOBase) -> Any:
    """Of one that is read, and only read: what a loop writes is a log, most likely."""
    if file.closed or file.writable() or not file.readable() or not file.seekable():
        return None
    try:
        return file.tell()
    except OSError:  # of text, between two lines of an iteration
        return Unknown()


def _state_of(value: Any) -> Any:
    """Its state_dict()."""
    try:
        return value.state_dict()
    except Exception:  # the script's own code: what it cannot say is not looked at
        return None
