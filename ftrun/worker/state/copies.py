"""Copies of a script's values, made by Python's own copy protocol, and put back where the script has them.

A copy is a pickle. In it stands by its name what the job guards itself (models, optimizers), and what Python cannot copy (a lock, a
generator, a file) or what is not to be copied (a loader, a process group) stands for *the one that is there*: when the copy is put
back, the thing at the same place stays. Everything else keeps its identity: containers, arrays, tensors and objects are changed in
place to hold what the copy holds, so whoever else holds them sees it. A tensor or an array over memory that the job guards (`p.data`)
stands for that memory, and nothing is written through it.

Copies lie in memory of the same user and are read by processes of the same run. They are read with classes and functions of modules
that are imported there already, and nothing else is imported.
"""

from __future__ import annotations

import collections
import concurrent.futures
import copyreg
import functools
import importlib
import io
import logging
import multiprocessing.process
import pickle
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from ftrun.worker.link.callers import module_of
from ftrun.worker.state import generators, serialization
from ftrun.worker.state.guarded_memory import GuardedMemory, Over
from ftrun.worker.state.in_place import ARRAYS, InPlace, layout

_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range))
_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType)
_STAY = (  # at their place; what they hold is their owner's
    types.ModuleType, types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.FrameType, types.CodeType,
    io.IOBase, Iterator, DataLoader, torch.distributed.ProcessGroup, DeviceMesh, torch.Stream, torch.Event,
    # they are of this process, and so are the numbers in them
    threading.Thread, threading.Condition, threading.Event, threading.Semaphore, threading.Barrier, threading.local, subprocess.Popen,
    multiprocessing.process.BaseProcess, concurrent.futures.Executor, concurrent.futures.Future, logging.Handler,
    tempfile.TemporaryDirectory,
)  # fmt: skip
_OF_TORCH = ("_", "distributed", "cuda", "fx", "jit")  # parts of torch whose objects hold numbers of this process
_HEAP_TYPE = 1 << 9  # of `type.__flags__`: it was made by a class statement (or as such a one)


class CannotPlace(Exception):
    """A copy cannot be put back as a whole; the message says why."""


class TooLarge(Exception):
    """A copy would be larger than its limit."""


class Copied:
    """`data`: the copy. `left`: kinds of what is in it without a copy, each once, in the order in which they were met."""

    def __init__(self, data: bytes, copier: Copier, named: Iterable[int]) -> None:
        self.data = data
        self.left = list(dict.fromkeys(copier.left))
        self._copier = copier
        self._named = named

    def held(self) -> list[int]:
        """Ids of what in it can be changed in place. They are those of other things once this object is gone."""
        met = self._copier.memo.copy().items()
        held = [mark for mark, (_, thing) in met if mark not in self._copier.by_name and _is_changed_in_place(thing)]
        return [*held, *self._named]


def copied(
    value: Any,
    known: Mapping[int, str],
    most: int = sys.maxsize,
    memory: GuardedMemory | None = None,
    named: Mapping[int, Any] | None = None,
) -> Copied:
    """A copy of `value`. `known`: id -> name of the things that are not copied, as `placed` knows them. `memory`: what the job guards.

    `named`: id -> what stands for a container in the copy, of which the `named` of `placed` makes one.

    Equal values of the same structure give equal bytes in one process, as far as their own parts of the protocol do.

    Raises:
        TooLarge: For one of more than `most` bytes, before it is made.
        What the script's own part of the protocol raises.
    """
    file = _Limited(most)
    copier = _NamingCopier(file, known, memory, named) if named else Copier(file, known, memory)
    copier.dump(value)
    return Copied(file.getvalue(), copier, named or ())


def placed(
    there: Any,
    data: bytes | memoryview,
    known: Mapping[str, Any],
    in_place: InPlace | None = None,
    named: Callable[[Any], Any] | None = None,
) -> Any:
    """What a name that holds `there` is to be bound to: `there` itself, changed in place, where it can be.

    Args:
        there: The value now; an object of another kind is left as it is.
        data: A copy.
        known: Name -> thing, for what `copied` knew.
        in_place: Of the copies that are put back together with this one.
        named: Makes a container of what stands for it.

    Raises:
        CannotPlace: Nothing is changed then, but for things that were reached before.
    """
    in_place = in_place or InPlace()
    reader = _CopyReader(io.BytesIO(data), known, in_place.memory, named)
    try:
        new = reader.load()
    except CannotPlace:
        raise
    except Exception as error:  # the script's own code, too
        raise CannotPlace(f"{type(error).__name__}: {error}") from error
    placing = _Placing(reader.named, in_place)
    result = placing.of(there, new)
    if placing.met < reader.left:
        raise CannotPlace("what holds it has a copy protocol of its own")
    return result


def read(file: io.BytesIO) -> Any:
    """The value of which a copy begins here in the file, a new one. Raises: CannotPlace."""
    return _CopyReader(file, {}).load()


# -- writing -------------------------------------------------------------------------------------------------------------


class _Limited(io.BytesIO):
    def __init__(self, most: int) -> None:
        super().__init__()
        self._left = most

    def write(self, data: Any) -> int:
        self._left -= memoryview(data).nbytes  # a large array comes as a buffer, without a length
        if self._left < 0:
            raise TooLarge
        return super().write(data)


class Copier(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Mapping[int, str], memory: GuardedMemory | None) -> None:
        super().__init__(file, 5)
        self.left: list[str] = []
        self.by_name: set[int] = set()  # ids of what stands for itself
        self.known = known
        self._memory = memory

    def reducer_override(self, thing: Any) -> Any:
        """For everything but atoms and plain containers."""
        name = self.known.get(id(thing))
        if name is not None:
            self.by_name.add(id(thing))
            return _Known, (name,)
        kind = type(thing)
        if isinstance(thing, _BY_NAME):
            return NotImplemented if _is_importable(thing) else self.stays(thing)
        if isinstance(thing, torch.Tensor | np.ndarray) and self._memory is not None and (over := self._memory.over(thing)):
            self.by_name.add(id(thing))
            return _over, (over, *layout(thing))
        if isinstance(thing, torch.Tensor) and serialization.takes(thing):
            return _tensor, (
                serialization.pack(thing.detach(), "a tensor"),
                thing.requires_grad,
                isinstance(thing, torch.nn.Parameter),
            )
        if kind is types.MethodType:
            return _method, (thing.__func__, thing.__self__)
        found = generators.read(thing)
        if found is not None:
            return _Generator, found
        library, _, part = module_of(kind).partition(".")
        if library == "torch" and part.startswith(_OF_TORCH):
            self.by_name.add(id(thing))
            return _Stays, (kind.__qualname__,)
        if kind is object or isinstance(thing, _STAY):
            return self.stays(thing)
        try:
            by_table = copyreg.dispatch_table.get(kind)
            return by_table(thing) if by_table is not None else thing.__reduce_ex__(5)
        except Exception:  # as a lock, a socket, or what the script forbids to copy
            return self.stays(thing)

    def stays(self, thing: Any) -> Any:
        self.left.append(type(thing).__qualname__)
        self.by_name.add(id(thing))
        return _Stays, (type(thing).__qualname__,)


class _NamingCopier(Copier):
    """It is asked for each thing, also for those that have a way of their own in Python: hence only where containers are named."""

    def __init__(
        self, file: io.BytesIO, known: Mapping[int, str], memory: GuardedMemory | None, named: Mapping[int, Any]
    ) -> None:
        super().__init__(file, known, memory)
        self._named = named

    def persistent_id(self, thing: Any) -> Any:
        return self._named.get(id(thing))


def _is_importable(thing: Any) -> bool:
    """Is it found under its name in its module, or in its class?"""
    owner = getattr(thing, "__self__", None)
    if isinstance(owner, type):
        return bool(getattr(owner, thing.__name__, None) == thing) and _is_importable(owner)
    found: Any = sys.modules.get(getattr(thing, "__module__", None) or "builtins")
    for name in getattr(thing, "__qualname__", "?").split("."):
        found = getattr(found, name, None)
    return found is thing


# -- reading -------------------------------------------------------------------------------------------------------------


class _Known:
    """Stands in a copy for what the job knows by this name; its reader has that in place of it."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Stays:
    """Stands in a copy for what is at its place."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self) -> Any:
        """It may stand for the factory of a defaultdict, which has to be one already while it is read."""
        raise CannotPlace(f"a {self.kind} cannot be copied")


class _Generator:
    def __init__(self, kind: str, state: Any) -> None:
        self.kind, self.state = kind, state


def _method(function: Any, of: Any) -> Any:
    return types.MethodType(function, of)


def _tensor(data: bytes, requires_grad: bool, is_parameter: bool) -> Any:
    tensor = serialization.decode(data)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _over(over: Over, kind: str, shape: list[int], stride: list[int], requires_grad: bool, is_parameter: bool) -> Any:
    raise CannotPlace("it is read where it is known which memory that is")


class _CopyReader(pickle.Unpickler):
    def __init__(
        self,
        file: io.BytesIO,
        known: Mapping[str, Any],
        memory: GuardedMemory | None = None,
        named: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(file)
        self._known = known
        self._memory = memory
        self._made: dict[int, Any] = {}  # number of a container that is named -> itself
        self._make = named
        self.named: list[Any] = []  # what stands in the copy by its name
        self.left = 0  # things that have to be met at their places
        self._read_here: dict[str, Any] = {"_Known": self._named, "_Stays": self._staying, "_over": self._over}

    def persistent_load(self, named: tuple[Any, ...]) -> Any:
        """The container that this stands for, the same one each time."""
        if self._make is None:
            raise CannotPlace("it names a list that is not here")
        if named[0] not in self._made:
            self._made[named[0]] = self._make(named)
        return self._made[named[0]]

    def find_class(self, module: str, name: str) -> Any:
        """Only what is imported in this process."""
        if module == __name__ and name in self._read_here:
            return self._read_here[name]
        if module not in sys.modules and not _is_of_the_library(module):
            raise CannotPlace(f"the module {module} is not imported here")
        return super().find_class(module, name)

    def _named(self, name: str) -> Any:
        if name not in self._known:
            raise CannotPlace(f"there is no {name} here")
        self.named.append(self._known[name])
        return self._known[name]

    def _over(self, over: Over, kind: str, shape: list[int], stride: list[int], requires_grad: bool, is_parameter: bool) -> Any:
        if self._memory is None:
            raise CannotPlace("nothing is guarded here")
        try:
            if not kind.startswith("torch."):
                return self._memory.array(over, kind, shape, stride)
            tensor = self._memory.tensor(over, getattr(torch, kind.removeprefix("torch.")), shape, stride)
        except KeyError:
            raise CannotPlace(f"there is no {over[0]} here") from None
        return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)

    def _staying(self, kind: str) -> Any:
        self.left += 1
        return _Stays(kind)


def _is_of_the_library(module: str) -> bool:
    """A part of Python that another process happens to have imported already."""
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names and importlib.import_module(module) is not None


# -- putting back --------------------------------------------------------------------------------------------------------


class _Placing:
    """Of one copy. `met`: how many things that stay were found at their places."""

    def __init__(self, named: list[Any], in_place: InPlace) -> None:
        self.met = 0
        self._in_place = in_place
        self._targets: dict[int, Any] = {}  # id -> thing that holds a part of this copy by now
        # id of a part of the copy -> that part, and what it became
        self._done: dict[int, tuple[Any, Any]] = {id(thing): (thing, thing) for thing in named}

    def of(self, old: Any, new: Any) -> Any:
        """What stands for the part `new` of the copy, where `old` is now."""
        kind = type(new)
        if kind in _ATOMS:
            return new
        if id(new) in self._done:
            return self._done[id(new)][1]
        if kind is _Stays:
            if type(old).__qualname__ != new.kind:
                raise CannotPlace(f"a {new.kind} cannot be copied, and there is none at its place")
            self.met += 1
            return self._as(new, old)
        if kind is _Generator:
            free = self._is_free(old) and (id(old) not in self._in_place.taken or generators.read(old) == (new.kind, new.state))
            return self._as(new, generators.placed(new.kind, new.state, self._target(old) if free else None))
        there = old if type(old) is kind and old is not new else None
        if isinstance(new, tuple):
            return self._tuple(there, new)
        if isinstance(new, ARRAYS):
            found = self._in_place.array(there if self._is_free(there) else None, new)
            return self._as(new, self._target(found) if found is there else found)
        if kind is types.MethodType or kind is functools.partial:
            return self._as(new, self._call(there, new))
        if not _is_open(kind):
            return self._as(new, new)
        if there is not None and not (self._is_free(there) and (id(there) not in self._in_place.taken or _are_alike(there, new))):
            there = None
        target = self._as(new, new if there is None else self._target(there))
        for container, put in _CONTAINERS.items():
            if isinstance(new, container):
                put(self, there, new, target)
                break
        self._attributes(there, new, target)
        return target

    def _is_free(self, there: Any) -> bool:
        """May it be changed to hold a part of this copy? Else it holds another one, or something of its own."""
        return id(there) not in self._targets and id(there) not in self._in_place.apart

    def _target(self, there: Any) -> Any:
        self._targets[id(there)] = self._in_place.taken[id(there)] = there
        return there

    def _as(self, new: Any, result: Any) -> Any:
        self._done[id(new)] = new, result
        return result

    def _tuple(self, there: Any, new: tuple[Any, ...]) -> Any:
        olds = there if there is not None and len(there) == len(new) else (None,) * len(new)
        parts = [self.of(old, part) for old, part in zip(olds, new, strict=True)]
        if id(new) in self._done:  # it holds itself, by something that it holds
            return self._done[id(new)][1]
        if there is not None and len(there) == len(new) and all(a is b for a, b in zip(there, parts, strict=True)):
            return self._as(new, there)
        return self._as(new, tuple.__new__(type(new), parts))

    def _call(self, there: Any, new: Any) -> Any:
        """A bound method or a partial: the one that is there if it calls the same."""
        parts = [self.of(old, part) for old, part in zip(_held(there, new), _held(new, new), strict=True)]
        if there is not None and all(a is b for a, b in zip(_held(there, new), parts, strict=True)):
            return there
        if isinstance(new, types.MethodType):
            return types.MethodType(*parts)
        count = len(new.args)
        return functools.partial(
            parts[0], *parts[1 : 1 + count], **dict(zip(new.keywords, parts[1 + count :], strict=True))
        )

    def sequence(self, there: Any, new: Any, target: Any) -> None:
        """A list or a deque."""
        parts = list(new)
        if not _ATOMS.issuperset(map(type, parts)):
            olds = list(there) if there is not None else []
            parts = [self.of(olds[i] if i < len(olds) else None, part) for i, part in enumerate(parts)]
        target.clear()
        target.extend(parts)

    def mapping(self, there: Any, new: Any, target: Any) -> None:
        base: Any = collections.OrderedDict if isinstance(new, collections.OrderedDict) else dict
        items = [
            (key, self.of(base.get(there, key) if there is not None else None, part))
            for key, part in list(base.items(new))
        ]
        if isinstance(target, collections.defaultdict):
            target.default_factory = self.of(there.default_factory if there is not None else None, new.default_factory)
        base.clear(target)
        for key, part in items:
            base.__setitem__(target, key, part)

    def members(self, there: Any, new: Any, target: Any) -> None:
        parts = [self.of(None, part) for part in new]
        target.clear()
        target.update(parts)

    def _attributes(self, there: Any, new: Any, target: Any) -> None:
        ours = getattr(new, "__dict__", None)
        if ours is not None:
            before = dict(vars(there)) if there is not None else {}
            found = {name: self.of(before.get(name), part) for name, part in list(ours.items())}
            space = vars(target)
            for name in [name for name in space if name not in found]:
                del space[name]
            space.update(found)
        for slot, descriptor in _slots(type(new)):
            part = getattr(new, slot, _NONE)
            if part is not _NONE:
                descriptor.__set__(target, self.of(getattr(there, slot, None), part))
            elif there is not None and hasattr(there, slot):
                descriptor.__delete__(target)


_NONE = object()
_LARGE = 1 << 20  # bytes


def _are_alike(one: Any, other: Any) -> bool:
    """Two of a kind: do they hold the same, as far as copies tell?"""
    try:
        return copied(one, {}, _LARGE).data == copied(other, {}, _LARGE).data
    except Exception:  # the script's own code, too
        return False


def _held(thing: Any, like: Any) -> list[Any]:
    """What a bound method or a partial is made of; of one that is made otherwise than `like`, or of none, nothings."""
    if isinstance(like, types.MethodType):
        return [thing.__func__, thing.__self__] if thing is not None else [None, None]
    alike = thing is not None and len(thing.args) == len(like.args) and list(thing.keywords) == list(like.keywords)
    if not alike:
        return [None] * (1 + len(like.args) + len(like.keywords))
    return [thing.func, *thing.args, *thing.keywords.values()]


_CONTAINERS: dict[Any, Callable[[_Placing, Any, Any, Any], None]] = {
    dict: _Placing.mapping,
    list: _Placing.sequence,
    collections.deque: _Placing.sequence,
    set: _Placing.members,
}


def _slots(kind: type) -> Iterator[tuple[str, Any]]:
    """Name and descriptor of each slot of a class."""
    for one in kind.__mro__:
        for name, found in vars(one).items() if "__slots__" in vars(one) else ():
            if isinstance(found, types.MemberDescriptorType):
                yield name, found


_BASES = (*_CONTAINERS, collections.OrderedDict, collections.defaultdict, types.SimpleNamespace)


def _is_open(kind: type) -> bool:
    """Is all that an object of this class holds its attributes, and the parts of a plain container?

    Others are taken as they are made: nobody but their class knows what they hold.
    """
    # a deque is made as a class statement makes a class, from Python 3.12 on
    base = next(one for one in kind.__mro__ if one in _BASES or not one.__flags__ & _HEAP_TYPE)
    if base is not object:
        return base in _BASES
    own = [name for name in ("__reduce_ex__", "__reduce__") if getattr(kind, name) is not getattr(object, name)]
    return not own and (hasattr(kind, "__dict__") or bool(list(_slots(kind))))


def _is_changed_in_place(thing: Any) -> bool:
    kind = type(thing)
    if kind in _ATOMS or kind is tuple:
        return False
    return isinstance(thing, ARRAYS) or _is_open(kind) or kind in generators.KINDS
