"""Recreate the processes of a DataLoader in the state that they had.

Their output may depend on their history: each draws from its own random streams from batch to batch, persistent ones from
epoch to epoch, and the data set in it may count or draw by itself. So each process notes, after each of its batches, what has
changed since it began, in memory that it shares with the rank. The rank keeps with its step the notes from before the batch in
flight, and processes of a replacement begin with them. The loader itself stays the script's, and is iterated as the script would:
only while its iterator is made, this module wraps its `collate_fn` and `worker_init_fn`.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import struct
import types
import weakref
from collections.abc import Iterator
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from ftrun.worker.memory import serialization
from ftrun.worker.state import rng
from ftrun.worker.torch_compat import loader_private
from ftrun.worker.variables import generators

_NOTE = struct.Struct("<QQ")  # number of the batch + 1, and length
_ROOM = 32768  # bytes of a note; if a data set holds more, the note has the random streams only
_FEW = 100  # elements of a container that the search enters, at most
_MANY = 300  # objects of a data set that the search visits, at most
_ATOMS = (type(None), bool, int, float, str, bytes)
_STREAMS = ("python", "torch", "numpy")
_GENERATORS = tuple(generators.KINDS)


class Notes:
    """The state of each process after each of its latest batches, in memory that the rank and its loader's processes share."""

    def __init__(self, processes: int, depth: int) -> None:
        self._depth = depth
        self._memory = RawArray(ctypes.c_ubyte, processes * depth * _ROOM)

    def _at(self, process: int, number: int) -> memoryview:
        start = (process * self._depth + number % self._depth) * _ROOM
        return memoryview(self._memory).cast("B")[start : start + _ROOM]

    def write(self, process: int, number: int, data: bytes) -> None:
        place = self._at(process, number)
        place[_NOTE.size : _NOTE.size + len(data)] = data
        _NOTE.pack_into(place, 0, number + 1, len(data))

    def read(self, process: int, number: int) -> bytes | None:
        """Return the note of a batch; None if there is none."""
        place = self._at(process, number)
        there, length = _NOTE.unpack_from(place)
        return bytes(place[_NOTE.size : _NOTE.size + length]) if there == number + 1 else None

    def last(self, process: int) -> bytes | None:
        """Return the latest note."""
        number = max(_NOTE.unpack_from(self._at(process, n))[0] for n in range(self._depth)) - 1
        return self.read(process, number) if number >= 0 else None


# -- in a process of the loader ------------------------------------------------------------------------------------------


class _Process:
    """This process of the loader, from the end of its `worker_init_fn` on."""

    def __init__(self, number: int, notes: Notes, begin: bytes | None, skips: bool) -> None:
        self._number, self._notes, self._begin, self._skips = number, notes, begin, skips
        self._batches = 0
        self._first = self._now()
        self._go_to_begin()
        if skips:
            _give_nothing_once(_data_set())

    def _now(self) -> dict[str, Any]:
        streams = rng.capture()
        root = _data_set()
        return {**{name: streams.get(name) for name in _STREAMS}, "data": held_by(root), "kinds": kinds_in(root)}

    def _go_to_begin(self) -> None:
        if self._begin is None:
            return
        saved = serialization.decode(self._begin)
        rng.apply({**rng.capture(), **{name: saved[name] for name in _STREAMS if name in saved}})
        put_into(_data_set(), saved["data"])

    def is_skipped(self, samples: Any) -> bool:
        """Is it the batch without indices that stands for one of the predecessor's? If so, go to the beginning state."""
        skips, self._skips = self._skips and isinstance(samples, list) and not samples, False
        if skips:
            self._go_to_begin()
        return skips

    def note(self) -> None:
        """Write the note of a complete batch."""
        now, first = self._now(), self._first
        changed = {name: now[name] for name in _STREAMS if now[name] != first[name]}
        opened = {holder for holder, kinds in now["kinds"].items() if first["kinds"].get(holder) != kinds}
        data = {
            path: value
            for path, value in now["data"].items()
            if path[:-1] not in opened and not _is_of_this_process(first["data"].get(path, 0), value)
            if path not in first["data"] or first["data"][path] != value
        }
        note = serialization.plain({**changed, "data": data})
        if len(note) > _ROOM - _NOTE.size:
            note = serialization.plain({**changed, "data": {}})
        self._notes.write(self._number, self._batches, note)
        self._batches += 1


def _is_of_this_process(before: Any, now: Any) -> bool:
    """May it describe something that only this process has, as a descriptor does, or a flag `opened`?"""
    return type(now) is bool or (before is None and type(now) is int)


def _give_nothing_once(data_set: Any) -> None:
    """Let a data set that gives many items at a time give none when it is first asked for none, whatever its own code would do."""
    given = getattr(data_set, "__getitems__", None)
    if given is None or not hasattr(data_set, "__dict__"):
        return
    own = vars(data_set).get("__getitems__")

    def items(indices: Any) -> Any:
        if own is None:
            vars(data_set).pop("__getitems__", None)
        else:
            vars(data_set)["__getitems__"] = own
        return [] if not len(indices) else given(indices)

    vars(data_set)["__getitems__"] = items


_process: _Process | None = None


def _data_set() -> Any:
    info = get_worker_info()
    return None if info is None else info.dataset


class Beginning:
    """Calls the `worker_init_fn` of a loader, and then puts the process into its beginning state."""

    def __init__(self, inner: Any, notes: Notes, begin: dict[int, bytes], skips: int) -> None:
        self._inner, self._notes, self._begin, self._skips = inner, notes, begin, skips

    def __call__(self, number: int) -> None:
        global _process
        if self._inner is not None:
            self._inner(number)
        _process = _Process(number, self._notes, self._begin.get(number), number < self._skips)


class Collating:
    """Calls the `collate_fn` of a loader, which ends a batch, and then writes the note."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, samples: Any) -> Any:
        here = _process
        if here is None:
            return self._inner(samples)
        if here.is_skipped(samples):
            return None
        batch = self._inner(samples)
        here.note()
        return batch


# -- what a data set holds -----------------------------------------------------------------------------------------------

_Place = tuple["str | int", ...]  # attributes, keys and indices that lead there


def held_by(root: Any) -> dict[_Place, Any]:
    """Return what a data set may change when it gives an item: random generators, numbers, strings, small containers of those."""
    return {path: _value(thing) for path, _, thing in _parts(root)}


def kinds_in(root: Any) -> dict[_Place, dict[Any, str]]:
    """Return the types of the other objects that a data set holds, by their holder.

    One of them may be a file that was opened meanwhile. The values beside it (an `opened`, a descriptor) mean nothing in another process.
    """
    found: dict[_Place, dict[Any, str]] = {}
    for path, holder in _holders(root):
        inside = _inside(holder) or []
        found[path] = {key: type(thing).__qualname__ for key, thing in inside if not _is_plain(thing)}
    return found


def put_into(root: Any, values: dict[_Place, Any]) -> None:
    """Put back what `held_by` returned, at the places that still exist."""
    for path, holder, thing in list(_parts(root)):
        if path in values:
            _put(holder, path[-1], thing, values[path])


def _parts(root: Any) -> Iterator[tuple[_Place, Any, Any]]:
    """Yield (path, holder, value) of every plain value near the root."""
    for path, holder in _holders(root):
        for key, thing in _inside(holder) or ():
            if _is_plain(thing):
                yield (*path, key), holder, thing


def _holders(root: Any) -> Iterator[tuple[_Place, Any]]:
    """Yield (path, object) of the root and of every object near it that holds others."""
    seen: set[int] = set()
    todo: collections.deque[tuple[_Place, Any]] = collections.deque([((), root)])
    while todo and len(seen) < _MANY:
        path, holder = todo.popleft()
        inside = _inside(holder)
        if inside is None or id(holder) in seen:
            continue
        seen.add(id(holder))
        yield path, holder
        todo.extend(((*path, key), thing) for key, thing in inside if not _is_plain(thing))


def _inside(holder: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(holder, torch.Tensor | np.ndarray | type | types.ModuleType | types.FunctionType):
        return None
    if isinstance(holder, list | tuple | dict) and len(holder) > _FEW:
        return None
    if isinstance(holder, list | tuple):
        return list(enumerate(holder))
    inside = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    return [(key, thing) for key, thing in inside.items() if isinstance(key, str | int)]


def _is_plain(thing: Any) -> bool:
    if type(thing) is list or type(thing) is dict:
        values = thing.values() if isinstance(thing, dict) else thing
        return len(thing) <= _FEW and all(type(value) in _ATOMS for value in values)
    return type(thing) in _ATOMS or isinstance(thing, _GENERATORS)


def _value(thing: Any) -> Any:
    """Copy a value; for a generator return its kind and state, as the only values that are tuples."""
    if isinstance(thing, _GENERATORS):
        return generators.read(thing)
    return thing.copy() if isinstance(thing, list | dict) else thing


def _put(holder: Any, key: Any, thing: Any, value: Any) -> None:
    if type(value) is tuple:
        value = generators.placed(value[0], value[1], thing)
        if value is thing:
            return
    if type(thing) is type(value) and isinstance(thing, list):
        thing[:] = value
    elif type(thing) is type(value) and isinstance(thing, dict):
        thing.clear()
        thing.update(value)
    elif isinstance(holder, list | dict):
        holder[key] = value
    elif not isinstance(holder, tuple):
        vars(holder)[key] = value


# -- in the rank ---------------------------------------------------------------------------------------------------------

_crews: weakref.WeakKeyDictionary[DataLoader[Any], Crew] = weakref.WeakKeyDictionary()


def crew_of(loader: DataLoader[Any]) -> Crew:
    """Return the crew of a loader; every loop over it shares the crew, as it shares persistent processes."""
    return _crews.setdefault(loader, Crew())


class Crew:
    """This rank's knowledge of a loader's processes. `numbered`: it is known which of them gives which batch."""

    def __init__(self) -> None:
        self.numbered = False
        self._held: dict[int, bytes] = {}  # process -> its note before the next batch; if not numbered, before this pass
        self._last: tuple[int, bytes | None] | None = None  # the process that gave the batch in flight, and its note before that
        self._notes: Notes | None = None  # None: no process is known
        self._batches: dict[int, int] = {}  # process -> batches that it gave
        self._tasks = 0  # batches asked for in this pass
        self._stream = b""  # random state from which the loader drew the base of its processes' seeds
        self._later = False  # the loader drew that base before this pass
        self._anew = False  # the present processes, if any, are in a wrong state

    def is_unknown(self, loader: DataLoader[Any]) -> bool:
        """Did the script itself iterate a loader with persistent processes before? The loader then goes on with those."""
        return loader.persistent_workers and self._notes is None and loader_private.has_processes(loader)

    def capture(self) -> list[Any]:
        """Return the state of the processes, for a slot."""
        return [self._held, self._last, self._stream, self._later]

    def put_back(self, saved: list[Any]) -> None:
        """Take over a saved state; new processes then continue after its batch in flight."""
        self._held, self._last, self._stream, self._later = dict(saved[0]), saved[1], saved[2], saved[3]
        self._anew = True

    def go_back(self) -> None:
        """Go back, so that the processes give the batch in flight again."""
        if self._last is not None:
            process, note = self._last
            self._held.pop(process, None) if note is None else self._held.update({process: note})
        self._last, self._anew = None, True

    @contextlib.contextmanager
    def beginning(self, loader: DataLoader[Any], skip: int, again: bool) -> Iterator[int]:
        """Wrap the making of the loader's iterator, to begin with batch `skip` of a pass; yield how many empty batches come first.

        `again`: the loader gave that batch before.
        """
        persistent, anew = loader.persistent_workers, self._anew
        self._anew, self._last = False, None
        if persistent and anew and not self.is_unknown(loader):
            loader_private.drop_processes(loader)
        empty = skip % loader.num_workers if self.numbered else 0
        self._tasks = empty
        begins = skip == 0 and not again
        if persistent and loader_private.has_processes(loader):
            self._later |= begins
            yield empty
            return
        if skip == 0 and not persistent:
            self._held, self._later = {}, False
        self._later |= begins and bool(self._stream) and persistent
        self._batches = {}
        self._notes = Notes(loader.num_workers, (loader.prefetch_factor or 2) + 2)
        generator, collate, init = loader.generator, loader.collate_fn, loader.worker_init_fn
        stream = torch.default_generator if generator is None else generator
        if self._later:  # do not draw the base of the seeds again
            loader.generator = torch.Generator()
            loader.generator.set_state(torch.frombuffer(bytearray(self._stream), dtype=torch.uint8))
        else:
            self._stream = stream.get_state().numpy().tobytes()
        loader.collate_fn, loader.worker_init_fn = Collating(collate), Beginning(init, self._notes, dict(self._held), empty)
        try:
            yield empty
        finally:
            loader.generator, loader.collate_fn, loader.worker_init_fn = generator, collate, init

    def gave(self, loader: DataLoader[Any]) -> None:
        """Take the note of the process that gave the next batch of the pass."""
        if self._notes is None or not self.numbered:
            return
        process = self._tasks % loader.num_workers
        number = self._batches.get(process, 0)
        note = self._notes.read(process, number)
        self._last = process, self._held.get(process)
        self._held.pop(process, None) if note is None else self._held.update({process: note})
        self._tasks, self._batches[process] = self._tasks + 1, number + 1

    def passed(self, loader: DataLoader[Any]) -> None:
        """Take the latest notes at the end of a pass, when the processes wait."""
        if self._notes is not None and not self.numbered:
            found = {process: self._notes.last(process) for process in range(loader.num_workers)}
            self._held.update({process: note for process, note in found.items() if note is not None})
