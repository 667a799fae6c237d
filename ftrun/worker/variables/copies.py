"""Copy a script's values by Python's own copy protocol, and put the copies back where the script has them.

A copy is a pickle. It names the objects that the job guards itself (models, optimizers). For an object that Python cannot copy (a
lock, a generator, a file) or that must not be copied (a loader, a process group) it holds a placeholder: when the copy is put back,
the object at that place stays. Everything else keeps its identity: `placed` changes containers, arrays, tensors and objects in place,
so everyone who holds them sees the change. A tensor or an array over memory that the job guards (`p.data`) is copied as a reference
to that memory, and nothing is written through it.

Copies lie in memory of the same user, and processes of the same run read them. A reader uses only classes and functions of modules
that its process has imported already, or of the standard library.
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
from ftrun.worker.memory import serialization
from ftrun.worker.variables import generators
from ftrun.worker.variables.guarded_memory import GuardedMemory, Over
from ftrun.worker.variables.in_place import ARRAYS, InPlace, layout

_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range))
_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType)
_STAY = (  # objects that stay at their place; their content belongs to their owner
    types.ModuleType, types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.FrameType, types.CodeType,
    io.IOBase, Iterator, DataLoader, torch.distributed.ProcessGroup, DeviceMesh, torch.Stream, torch.Event,
    # these belong to this process, and so do the numbers in them
    threading.Thread, threading.Condition, threading.Event, threading.Semaphore, threading.Barrier, threading.local, subprocess.Popen,
    multiprocessing.process.BaseProcess, concurrent.futures.Executor, concurrent.futures.Future, logging.Handler,
    tempfile.TemporaryDirectory,
)  # fmt: skip
_OF_TORCH = ("_", "distributed", "cuda", "fx", "jit")  # parts of torch whose objects hold numbers of this process
_HEAP_TYPE = 1 << 9  # flag in `type.__flags__`: a class statement (or its equivalent) made the class


class CannotPlace(Exception):
    """A copy cannot be put back as a whole; the message says why."""


class TooLarge(Exception):
    """A copy would be larger than its limit."""


class Copied:
    """A copy. `data`: its bytes. `left`: the kinds of objects that were not copied, each once, in the order of the copy."""

    def __init__(self, data: bytes, copier: Copier, named: Iterable[int]) -> None:
        self.data = data
        self.left = list(dict.fromkeys(copier.left))
        self._copier = copier
        self._named = named

    def held(self) -> list[int]:
        """Return the ids of its parts that can be changed in place. They are valid only while this object lives."""
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
    """Copy `value`.

    Equal values of the same structure give equal bytes in one process, as far as their own parts of the protocol do.

    Args:
        value: Any value of the script.
        known: Id -> name of the objects that the copy names instead of copying them.
        most: Limit of the copy, bytes.
        memory: The memory that the job guards.
        named: Id -> stand-in for a container in the copy; the `named` of `placed` makes a container of it.

    Raises:
        TooLarge: If the copy would be larger than `most`; it is then not made.
        Exception: Whatever the script's own part of the protocol raises.
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
    """Put a copy back, and return the value to bind: `there` itself, changed in place, where that is possible.

    Args:
        there: The present value; an object of another kind is left as it is.
        data: A copy.
        known: Name -> object, for each name that `copied` knew.
        in_place: Shared by all copies that are put back together.
        named: Makes a container of its stand-in.

    Raises:
        CannotPlace: If the copy cannot be put back; objects that were reached before the failure may have changed.
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
    """Read the copy that begins at the file's position, as a new value.

    Raises:
        CannotPlace: If the copy names an object or a module that is missing here.
    """
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
        self.by_name: set[int] = set()  # ids of objects that the copy holds by reference
        self.known = known
        self._memory = memory

    def reducer_override(self, thing: Any) -> Any:
        """Reduce everything but atoms and plain containers; `pickle` calls it."""
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
        except Exception:  # a lock, a socket, or an object that the script forbids to copy
            return self.stays(thing)

    def stays(self, thing: Any) -> Any:
        self.left.append(type(thing).__qualname__)
        self.by_name.add(id(thing))
        return _Stays, (type(thing).__qualname__,)


class _NamingCopier(Copier):
    """A copier that also names containers. `pickle` then asks it about every object, which is slow: use it only for that."""

    def __init__(
        self, file: io.BytesIO, known: Mapping[int, str], memory: GuardedMemory | None, named: Mapping[int, Any]
    ) -> None:
        super().__init__(file, known, memory)
        self._named = named

    def persistent_id(self, thing: Any) -> Any:
        return self._named.get(id(thing))


def _is_importable(thing: Any) -> bool:
    """Does its module, or its class, have it under its name?"""
    owner = getattr(thing, "__self__", None)
    if isinstance(owner, type):
        return bool(getattr(owner, thing.__name__, None) == thing) and _is_importable(owner)
    found: Any = sys.modules.get(getattr(thing, "__module__", None) or "builtins")
    for name in getattr(thing, "__qualname__", "?").split("."):
        found = getattr(found, name, None)
    return found is thing


# -- reading -------------------------------------------------------------------------------------------------------------


class _Known:
    """Stands in a copy for the object that the job knows by this name; the reader puts that object in its place."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Stays:
    """Stands in a copy for the object that is at its place when the copy is put back."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self) -> Any:
        """Raise `CannotPlace`. It may stand for a defaultdict's factory, which must be callable already while the copy is read."""
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
        self.named: list[Any] = []  # objects that the copy holds by name
        self.left = 0  # objects that have to be met at their places
        self._read_here: dict[str, Any] = {"_Known": self._named, "_Stays": self._staying, "_over": self._over}

    def persistent_load(self, named: tuple[Any, ...]) -> Any:
        """Return the container that this stands for, the same one each time."""
        if self._make is None:
            raise CannotPlace("it names a list that is not here")
        if named[0] not in self._made:
            self._made[named[0]] = self._make(named)
        return self._made[named[0]]

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function of a module that this process has imported, or of the standard library."""
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
    """Is it a part of Python, which another process happened to import earlier? Imports it."""
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names and importlib.import_module(module) is not None


# -- putting back --------------------------------------------------------------------------------------------------------


class _Placing:
    """Puts one copy back. `met`: how many objects that stay were at their places."""

    def __init__(self, named: list[Any], in_place: InPlace) -> None:
        self.met = 0
        self._in_place = in_place
        self._targets: dict[int, Any] = {}  # id -> object that holds a part of this copy by now
        # id of a part of the copy -> that part, and the object that it became
        self._done: dict[int, tuple[Any, Any]] = {id(thing): (thing, thing) for thing in named}

    def of(self, old: Any, new: Any) -> Any:
        """Return the object for the part `new` of the copy, at whose place `old` is now."""
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
        """May it be changed to hold a part of this copy? If not, it holds another part, or something of its own."""
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
        if id(new) in self._done:  # it contains itself, through one of its parts
            return self._done[id(new)][1]
        if there is not None and len(there) == len(new) and all(a is b for a, b in zip(there, parts, strict=True)):
            return self._as(new, there)
        return self._as(new, tuple.__new__(type(new), parts))

    def _call(self, there: Any, new: Any) -> Any:
        """Put back a bound method or a partial: keep the present one if it calls the same."""
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
        """Put back a list or a deque."""
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
    """Do two objects of one kind hold the same, as far as their copies tell?"""
    try:
        return copied(one, {}, _LARGE).data == copied(other, {}, _LARGE).data
    except Exception:  # the script's own code, too
        return False


def _held(thing: Any, like: Any) -> list[Any]:
    """Return the parts of a bound method or a partial; a list of None if it is built otherwise than `like`, or missing."""
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
    """Yield the name and descriptor of each slot of a class."""
    for one in kind.__mro__:
        for name, found in vars(one).items() if "__slots__" in vars(one) else ():
            if isinstance(found, types.MemberDescriptorType):
                yield name, found


_BASES = (*_CONTAINERS, collections.OrderedDict, collections.defaultdict, types.SimpleNamespace)


def _is_open(kind: type) -> bool:
    """Does an object of this class hold nothing but its attributes, and the parts of a plain container?

    Objects of other classes are taken as the copy makes them: only their class knows their content.
    """
    # from Python 3.12 on, deque is a heap type too
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
