"""Keep long lists that only grow by logging the entries that are added to them.

A copy of a value names its long lists instead of holding them: the older entries of such a list lie in a log, in memory that
outlives the worker, and the copy holds their place in the log and the last entries themselves. So a step costs the same, however long
the list is. Entries go to the log in blocks of one size, and the list's length alone decides when: equal lists have equal logs.

Logged entries must not change any more. That is certain for numbers and strings, and for small containers of these that only the
list holds; a list of other entries is copied as a whole. If the script changes old entries (sorts the list, replaces some), `follow`
notices it when the last logged entry is another one, or block by block at looks, and logs the list anew.
`Variables.stopped` compares all of it before a repair.
"""

from __future__ import annotations

import array
import io
import itertools
import pickle
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ftrun.worker.variables.copies import Copied, TooLarge, copied, read
from ftrun.worker.variables.guarded_memory import GuardedMemory

LARGEST = 1 << 20  # bytes of a copy that is kept with each step
BLOCK, _SMALL_BLOCK = 64, 16  # entries in a block of numbers and strings, and of others, which cost more
_LONG = 2 * _SMALL_BLOCK
_LARGE = 1 << 10  # bytes; a larger copy is searched for long lists
_LARGEST_LOG = 1 << 28
_DEPTH = 4  # nesting of containers that the search for long lists follows
_FEW = 200  # elements of a container that it searches, at most
_PER_LOOK = 8  # blocks that a look compares
_SOON = 32  # copies; a list that has to be logged anew earlier than that does not only grow
_RETAINED = 32  # copies that slots may still hold: a step makes six at most, and each is overwritten within three steps
_IN_LOG, _WITH_LOG = b"L", b"W"  # begin a copy that names lists; a pickle begins with another byte
_COUNT, _AT, _LENGTH = struct.Struct("<H"), struct.Struct("<HQQ"), struct.Struct("<Q")
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))


class Records(Protocol):
    """The interface of a log; `memory/log.py` implements it."""

    @property
    def used(self) -> int: ...
    def append(self, record: bytes) -> None: ...
    def records(self, begin: int = 0, end: int | None = None) -> Iterator[memoryview]: ...
    def start_over(self, held: int) -> int: ...
    def forget(self, begin: int, end: int) -> None: ...


class _Unfit(Exception):
    """A list cannot be kept by what is added to it."""


class _InLog(NamedTuple):
    log: int
    begin: int
    end: int


class _History:
    """The history of one list; its first `logged` entries lie in the log."""

    def __init__(self, number: int, log: Records) -> None:
        self.number = number
        self._log = log
        self._list: Any = None
        self._block = BLOCK
        self._ends = array.array("Q")  # end of each block in the log
        self._begin = log.used
        self._last: Any = None  # the last entry that was logged
        self._turn = 0  # block that the last comparison took
        self._copies = _SOON  # copies since the list was logged anew
        self._recent: deque[int] = deque(maxlen=_RETAINED)  # where the log began for the last copies
        self._free = log.used  # the log from here to `_begin` can be freed once `_recent` holds nothing but `_begin`

    @property
    def logged(self) -> int:
        return self._block * len(self._ends)

    def follow(self, held: Any, looks: bool) -> tuple[_InLog, list[Any]]:
        """Log the entries that the list `held` has gained; return its place in the log, and the entries that are not logged.

        `looks`: also compare some of the logged entries.

        Raises:
            _Unfit: If the list does not only grow, or its entries may change later.
        """
        self._copies += 1
        count = self.logged
        is_as_it_was = count == 0 or (self._seems_to_grow(held) if held is self._list else self._is_sound(held))
        if is_as_it_was and looks:
            is_as_it_was = all(self._is_as_logged(held) for _ in range(min(_PER_LOOK, len(self._ends))))
        if not is_as_it_was:
            self._anew()
        elif count:
            self._last = held[count - 1]  # an equal entry, if `held` is another list
        if not self._ends:
            self._block = BLOCK if type(held[0]) in _ATOMS else _SMALL_BLOCK
        self._list = held
        rest = _behind(held, self.logged)
        done = 0
        while len(rest) - done >= 2 * self._block:
            self._log.append(_packed(rest[done : done + self._block]))
            self._ends.append(self._log.used)
            done += self._block
            self._last = rest[done - 1]
            if self._log.used - self._begin > _LARGEST_LOG:
                raise TooLarge
        del rest[:done]
        self._give_back()
        return _InLog(self.number, self._begin, self._log.used if self._ends else self._begin), rest

    def has_changed_unseen(self) -> bool:
        """Did the script change entries that `follow` would not compare?"""
        held = self._list
        return held is not None and self.logged > 0 and self._seems_to_grow(held) and not self._is_sound(held)

    def let_go(self) -> None:
        """Let the next copy compare all of the list: it may be another list by then, or have other entries."""
        self._list, self._last, self._copies = None, None, _SOON

    def _seems_to_grow(self, held: Any) -> bool:
        return len(held) >= self.logged and held[self.logged - 1] is self._last

    def _is_sound(self, held: Any) -> bool:
        """Are all logged entries unchanged? Takes time in proportion to the list's length."""
        return len(held) >= self.logged and all(self._is_as_logged(held) for _ in self._ends)

    def _is_as_logged(self, held: Any) -> bool:
        """Is one block unchanged? Each call compares the next block."""
        turn = self._turn = (self._turn + 1) % len(self._ends)
        begin = self._ends[turn - 1] if turn else self._begin
        first, last = turn * self._block, (turn + 1) * self._block
        entries = held[first:last] if type(held) is list else [*itertools.islice(held, first, last)]
        try:
            return all(record == _packed(entries) for record in self._log.records(begin, self._ends[turn]))
        except _Unfit:
            return False

    def _anew(self) -> None:
        if self._copies < _SOON:
            raise _Unfit
        self._copies = 0
        self._ends = array.array("Q")
        self._begin = self._log.start_over(min(self._recent, default=0))

    def _give_back(self) -> None:
        """Free the part of the log that no copy names any more."""
        self._recent.append(self._begin)
        if self._free != self._begin and self._recent.count(self._begin) == _RETAINED:
            if self._free < self._begin:
                self._log.forget(self._free, self._begin)
            self._free = self._begin


class Histories:
    """The histories of one rank. `logs`: the logs to write to; without any, every list is copied as a whole."""

    def __init__(self, memory: GuardedMemory | None = None) -> None:
        self._memory = memory  # the memory that the job guards
        self.logs: Sequence[Records] = ()
        self._large: set[str] = set()  # names of values that are searched for long lists
        self._unfit: set[str] = set()
        self._of: dict[str, list[_History]] = {}
        self._used: set[int] = set()  # numbers of logs in use

    def copied(self, name: str, value: Any, known: Mapping[int, str], is_kept: bool, looks: bool) -> Copied:
        """Copy a value as `copies.copied` does, with its long lists in logs.

        Args:
            name: The value's name.
            value: The value.
            known: As for `copies.copied`.
            is_kept: The copy goes into a slot; otherwise it is only compared.
            looks: Compare some of the logged entries, too.

        Raises:
            TooLarge: If the copy is too large even without its long lists.
        """
        if name not in self._large:
            try:
                made = copied(value, known, LARGEST, self._memory)
            except TooLarge:
                self._large.add(name)
            else:
                if len(made.data) > _LARGE:
                    self._large.add(name)
                return made
        lists = [*_long_lists(value)] if name not in self._unfit else []
        if lists and is_kept and self.logs:
            try:
                return self._in_parts(name, value, known, lists, looks)
            except _Unfit:
                self._unfit.add(name)
                self._used -= {one.number for one in self._of.pop(name, ())}
        elif lists and not self.logs:
            lists = []
        try:
            return copied(value, known, LARGEST, self._memory)
        except TooLarge:
            if not lists or is_kept:
                raise
        return _by_length(value, known, self._memory, lists)

    def _in_parts(self, name: str, value: Any, known: Mapping[int, str], lists: list[Any], looks: bool) -> Copied:
        ours = self._of.setdefault(name, [])
        while len(ours) < len(lists):
            free = next((number for number in range(len(self.logs)) if number not in self._used), None)
            if free is None:
                raise _Unfit
            ours.append(_History(free, self.logs[free]))
            self._used.add(free)
        places, named = [], {}
        for number, (one, history) in enumerate(zip(lists, ours, strict=False)):
            place, rest = history.follow(one, looks)
            places.append(_AT.pack(*place))
            named[id(one)] = _named(number, one, pickle.dumps(rest, 5) if _are_atoms(rest) else rest)
        made = copied(value, known, LARGEST, self._memory, named)
        made.data = b"".join((_IN_LOG, _COUNT.pack(len(places)), *places, made.data))
        return made

    def changed_unseen(self) -> list[str]:
        """Return the names of values in whose lists the script changed old entries that the next copy would not compare."""
        return [name for name, histories in self._of.items() if any(one.has_changed_unseen() for one in histories)]

    def let_go(self, name: str | None = None) -> None:
        """Let the next copy compare the lists of that value as a whole; None = of all values."""
        for histories in self._of.values() if name is None else [self._of.get(name, [])]:
            for one in histories:
                one.let_go()


def _by_length(value: Any, known: Mapping[int, str], memory: GuardedMemory | None, lists: list[Any]) -> Copied:
    """Copy a value with only the length and last entries of its long lists: enough to detect that they grew."""
    named = {}
    for number, one in enumerate(lists):
        rest = _behind(one, len(one) - _SMALL_BLOCK)
        try:
            named[id(one)] = _named(number, one, b"%d " % len(one) + _packed(rest))
        except _Unfit:
            raise TooLarge from None
    return copied(value, known, LARGEST, memory, named)


# -- lists ---------------------------------------------------------------------------------------------------------------


def _long_lists(value: Any, depth: int = _DEPTH, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield the long lists and deques in a value, each once."""
    seen = set() if seen is None else seen
    kind = type(value)
    if kind is list or (kind is deque and (value.maxlen is None or len(value) < value.maxlen)):
        if len(value) >= _LONG:
            if id(value) not in seen:
                seen.add(id(value))
                yield value
            return
    if depth and (kind in (list, tuple) or isinstance(value, dict)) and len(value) <= _FEW:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _long_lists(part, depth - 1, seen)


def _behind(held: Any, count: int) -> list[Any]:
    """Return the entries of a list or deque after the first `count`."""
    return held[count:] if type(held) is list else [held[at] for at in range(count - len(held), 0)]


def _named(number: int, held: Any, rest: Any) -> tuple[Any, ...]:
    """Return the stand-in for a list or a deque in a copy."""
    return (number, rest) if type(held) is list else (number, rest, held.maxlen)


def _are_atoms(entries: list[Any]) -> bool:
    return _ATOMS.issuperset(map(type, entries))


def _packed(entries: list[Any]) -> bytes:
    """Pack entries for the log. Raises `_Unfit` if one of them may change unnoticed."""
    if _are_atoms(entries):
        return pickle.dumps(entries, 5)
    holders = map(sys.getrefcount, entries)
    if not all(_stays(one) or (count <= _OF_ONE and _is_small(one)) for one, count in zip(entries, holders, strict=True)):
        raise _Unfit
    return copied(entries, {}).data


def _stays(thing: Any) -> bool:
    """Can nobody change it?"""
    kind = type(thing)
    return kind in _ATOMS or (kind is tuple and all(map(_stays, thing))) or (isinstance(thing, np.generic) and not thing.dtype.hasobject)


def _is_small(thing: Any) -> bool:
    """Is it a small container, or a one-element tensor, whose parts cannot change?"""
    kind = type(thing)
    if kind is dict:
        return all(map(_stays, thing)) and all(map(_stays, thing.values()))
    return (kind is list and all(map(_stays, thing))) or (kind is torch.Tensor and thing.numel() == 1)


def _references() -> int:
    """Return the count that `sys.getrefcount` gives in `_packed` for an object that only the list holds."""
    held: list[Any] = [{}]
    rest = held[0:]
    return _counted(rest[:1])


def _counted(entries: list[Any]) -> int:
    holders = map(sys.getrefcount, entries)
    return next(count for _, count in zip(entries, holders, strict=True))


_OF_ONE = _references()


# -- copies that name lists ----------------------------------------------------------------------------------------------


def whole(data: bytes, logs: Sequence[Records]) -> bytes:
    """Return a copy with the logged entries that it names, so that it can be read elsewhere, and later.

    Raises:
        Damaged: If a record of a log fails its check.
    """
    if data[:1] != _IN_LOG:
        return data
    places, at = _places(data)
    parts = [b"".join(logs[log].records(begin, end)) for log, begin, end in places]
    lengths = [_LENGTH.pack(len(part)) for part in parts]
    return b"".join((_WITH_LOG, _COUNT.pack(len(parts)), *lengths, *parts, data[at:]))


def _places(data: bytes) -> tuple[list[_InLog], int]:
    """Return the places in logs that a copy begins with, and the offset of its pickle."""
    (count,) = _COUNT.unpack_from(data, 1)
    end = 1 + _COUNT.size + count * _AT.size
    return [_InLog(*one) for one in _AT.iter_unpack(data[1 + _COUNT.size : end])], end


def parts_of(data: bytes) -> tuple[memoryview, Callable[[tuple[Any, ...]], Any]]:
    """Return the pickle in a copy that `whole` gave, and the function that makes the lists that it names."""
    view = memoryview(data)
    logs: list[memoryview] = []
    if data[:1] == _WITH_LOG:
        (count,) = _COUNT.unpack_from(data, 1)
        at = 1 + _COUNT.size
        lengths = [*itertools.chain(*_LENGTH.iter_unpack(view[at : at + count * _LENGTH.size]))]
        at += count * _LENGTH.size
        for length in lengths:
            logs.append(view[at : at + length])
            at += length
        view = view[at:]
    return view, lambda named: _list_of(named, logs)


def _list_of(named: tuple[Any, ...], logs: list[memoryview]) -> Any:
    number, rest, *more = named
    file, entries = io.BytesIO(logs[number]), []
    while file.tell() < len(logs[number]):
        entries += read(file)
    entries += pickle.loads(rest) if isinstance(rest, bytes) else rest  # noqa: S301 - private memory, atoms
    return deque(entries, *more) if more else entries
