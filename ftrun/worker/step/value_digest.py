"""Digest a pickled copy of a script's value, so that equal values give equal digests in any process and any order of insertion.

Pickles of a set of strings, or of two equal strings that are one object here and two there, differ between processes. So this module
reads a copy into its parts (numbers, strings, containers; for any other object the name of its constructor, the arguments and the
state), and digests those: sorted for a set or a dict, and a shared part each time it occurs. It never looks up, imports or calls
anything that a copy names.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
from collections.abc import Iterable
from typing import Any

_IN_ORDER = {("collections", "OrderedDict")}  # containers whose order of keys counts


def digest(copy: bytes) -> int | None:
    """Return 64 bits; None for a copy that cannot be compared."""
    reader = _PartsReader(io.BytesIO(copy))
    try:
        value = reader.load()
        walk = _ValueWalk()
        found = walk.of(value)
    except (pickle.UnpicklingError, RecursionError, AttributeError, TypeError, ValueError, EOFError):
        return None
    if any(id(made) not in walk.met for made in reader.made):  # a call took a part, and dropped it
        return None
    return int.from_bytes(found[:8], "little")


class _Made:
    """A call that a copy makes, and the changes to its result. `what`: module and name of the function or class that it calls."""

    what: tuple[str, str]
    all: list[_Made]  # all calls of this copy

    def __new__(cls, *args: Any, **named: Any) -> _Made:
        made = object.__new__(cls)
        made.given = [args, named]
        made.parts, made.items, made.members = [], [], []
        cls.all.append(made)
        return made

    given: list[Any]  # the arguments, then each state that `__setstate__` sets
    parts: list[Any]
    items: list[tuple[Any, Any]]
    members: list[Any]

    def __init__(self, *args: Any, **named: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.given.append(state)

    def append(self, part: Any) -> None:
        self.parts.append(part)

    def extend(self, parts: Iterable[Any]) -> None:
        self.parts.extend(parts)

    def add(self, part: Any) -> None:
        self.members.append(part)

    def __setitem__(self, key: Any, part: Any) -> None:
        self.items.append((key, part))


class _PartsReader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.made: list[_Made] = []
        self._kinds: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that stands for the named object, without importing that."""
        what = module, name
        if what not in self._kinds:
            self._kinds[what] = type(name, (_Made,), {"what": what, "all": self.made})
        return self._kinds[what]


class _ValueWalk:
    def __init__(self) -> None:
        self.met: set[int] = set()
        self._done: dict[int, bytes] = {}
        self._under_way: set[int] = set()

    def of(self, value: Any) -> bytes:
        kind = type(value)
        if kind is str:
            return _sum(b"s", value.encode(errors="surrogatepass"))
        if kind is float:
            return _sum(b"f", struct.pack("<d", value))
        if kind is bytes or kind is bytearray:
            return _sum(kind.__name__.encode(), bytes(value))
        if value is None or kind in (int, bool, complex):
            return _sum(b"a", f"{kind.__name__} {value!r}".encode())
        if isinstance(value, type):
            return _sum(b"n", *_named(value))
        mark = id(value)  # stays unique: all parts live as long as the copy
        if mark in self._under_way:
            return _sum(b"^")  # it holds itself
        if mark not in self._done:
            self._under_way.add(mark)
            self._done[mark] = self._inside(value)
            self._under_way.discard(mark)
        return self._done[mark]

    def _inside(self, value: Any) -> bytes:
        if isinstance(value, _Made):
            self.met.add(id(value))
            items = [self.of(key) + self.of(part) for key, part in value.items]
            return _sum(
                b"m",
                *_named(type(value)),
                *map(self.of, [*value.given, value.parts]),
                _sum(b"i", *(items if value.what in _IN_ORDER else sorted(items))),
                _sum(b"e", *sorted(map(self.of, value.members))),
            )
        if isinstance(value, dict):
            return _sum(b"d", *sorted(self.of(key) + self.of(part) for key, part in value.items()))
        if isinstance(value, set | frozenset):
            return _sum(type(value).__name__.encode(), *sorted(map(self.of, value)))
        return _sum(type(value).__name__.encode(), *map(self.of, value))  # a list or a tuple


def _named(kind: type) -> tuple[bytes, ...]:
    return tuple(part.encode(errors="surrogatepass") for part in getattr(kind, "what", ("", kind.__name__)))


def _sum(kind: bytes, *parts: bytes) -> bytes:
    found = hashlib.blake2b(kind, digest_size=16)
    for part in parts:
        found.update(struct.pack("<q", len(part)))
        found.update(part)
    return found.digest()
