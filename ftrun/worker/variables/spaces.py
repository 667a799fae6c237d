"""Find the spaces that hold a script's values: local variables of the functions on the stack, globals, attributes, closures.

A space has the same name in every process of the run that is at the same place of the script, so values of one process can be put
into another. The search finds the spaces that the loop can reach when it begins; objects that it makes later lie in one of them.
"""

from __future__ import annotations

import argparse
import collections
import contextvars
import dataclasses
import enum
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ExtensionFileLoader
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ftrun.worker.link.callers import is_script, module_of
from ftrun.worker.torch_compat.frames_private import bind_local, has_own_locals, locals_of

_MANY = 20_000  # spaces, at most
_FEW = 200  # elements of a container that is searched for objects, at most
_BAGS = (types.SimpleNamespace, argparse.Namespace)  # objects of a library that hold what the script puts there
_ABSENT = object()
_DEFAULTS = "(defaults)"
_OF_MODULES = frozenset(vars(torch.nn.Module()))


@dataclasses.dataclass(frozen=True)
class Space:
    """A space. `key` is its name; messages display `shown` before the names of its values.

    `owner`: the object whose attributes these are. `raw`: a dict of the values, and maybe more, for frequent looks. `frame`: of locals.
    """

    key: str
    shown: str
    read: Callable[[], Mapping[str, Any]]
    bind: Callable[[str, Any], None]
    owner: Any = None
    raw: dict[str, Any] | None = None
    frame: FrameType | None = None

    root: str = ""  # the function or module whose variables lead here


def script_modules() -> list[tuple[str, ModuleType]]:
    """Return the script's own modules that it has imported, without those that a compiler (Inductor) made."""
    found = []
    for name, module in list(sys.modules.items()):
        file, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
        imported = spec is not None and not isinstance(spec.loader, ExtensionFileLoader)
        if name != "__main__" and imported and file and os.path.isabs(file) and is_script(file):
            found.append((name, module))
    return found


def module_prefix(space: dict[str, Any]) -> str:
    """Return the prefix for names of a module's global variables; "" for the program itself."""
    name = space.get("__name__", "?")
    return "" if name == "__main__" else f"{name}."


def of_the_script(kind: type) -> bool:
    """Is the class defined in a file of the script?"""
    file = getattr(sys.modules.get(module_of(kind)), "__file__", None)
    return file is not None and is_script(file)


def is_open(thing: Any) -> bool:
    """Is it an object whose attributes the script writes?"""
    kind = type(thing)
    return isinstance(thing, _BAGS) or module_of(kind).startswith("torch.utils.data") or of_the_script(kind)


def found(
    frames: list[FrameType],
    modules: list[torch.nn.Module],
    passed_over: Callable[[Any], bool],
    counts: Callable[[Space, str], bool],
    admits: Callable[[Space], bool],
) -> list[Space]:
    """Return all spaces, each once.

    Args:
        frames: The script's frames around the loop, the innermost first.
        modules: The protected modules, whose attributes beside tensors and submodules are spaces.
        passed_over: Must the search not enter that object?
        counts: Does the search enter the value of that name of a space?
        admits: Is that a space? If not, the search may find its object at another place.
    """
    walk = _Search(passed_over, counts, admits)
    depth: collections.Counter[str] = collections.Counter()
    for frame in frames:
        if has_own_locals(frame):
            depth[frame.f_code.co_name] += 1
            walk.add(_of_frame(frame, depth[frame.f_code.co_name]), id(frame))
    main = sys.modules.get("__main__")
    spaces = [vars(main)] if main is not None and is_script(getattr(main, "__file__", None) or "") else []
    spaces += [*(vars(module) for _, module in script_modules()), *(frame.f_globals for frame in frames)]
    for space in spaces:
        prefix = module_prefix(space)
        walk.add(_of_dict(f"global {prefix}", prefix, space), id(space))
    for number, root in enumerate(modules):
        for name, part in root.named_modules():
            own = type(part).get_extra_state is not torch.nn.Module.get_extra_state  # it returns its state itself
            if not own and not isinstance(part, DistributedDataParallel):
                walk.add(_of_part(f"model {number}.{name}.", part), id(part))
    return walk.all()


class _Search:
    def __init__(
        self, passed_over: Callable[[Any], bool], counts: Callable[[Space, str], bool], admits: Callable[[Space], bool]
    ) -> None:
        self._passed_over = passed_over
        self._counts = counts
        self._admits = admits
        self._spaces: list[Space] = []
        self._root = ""  # root of the spaces that are added now
        self._seen: set[int] = set()
        self._keys: set[str] = set()  # the first space of a name counts: the innermost frame's

    def add(self, space: Space, mark: int) -> None:
        if mark not in self._seen and space.key not in self._keys and len(self._spaces) < _MANY:
            space = dataclasses.replace(space, root=self._root or space.key)
            if self._admits(space):
                self._seen.add(mark)
                self._keys.add(space.key)
                self._spaces.append(space)

    def all(self) -> list[Space]:
        for space in self._spaces:  # it grows meanwhile
            self._root = space.root
            for name, value in list(space.read().items()):
                if self._counts(space, name):
                    self._look(f"{space.key}{name}", f"{space.shown}{name}", value)
        return self._spaces

    def _look(self, key: str, shown: str, value: Any) -> None:
        if isinstance(value, DataLoader):  # the job may iterate it, and then keeps all of it but the data set
            self._look(f"{key}.dataset", f"{shown}.dataset", value.dataset)
        if (
            type(value) in (int, float, str, bool, type(None))
            or isinstance(value, ModuleType)
            or self._passed_over(value)
        ):
            return
        if isinstance(value, types.MethodType):
            value = value.__self__
        if isinstance(value, contextvars.ContextVar):
            self.add(_of_context(f"{key}.", value, f"{shown}."), id(value))
            return
        if isinstance(value, type):
            if of_the_script(value) and not issubclass(value, enum.Enum):
                self.add(_of_object(f"{key}.", value, f"{shown}."), id(value))
        elif isinstance(value, types.FunctionType):
            if is_script(value.__code__.co_filename):
                self.add(_of_function(f"{key}().", value, f"{shown}."), id(value))
        elif isinstance(value, list | tuple | dict | collections.deque):
            self._elements(key, shown, value)
        elif is_open(value) and not isinstance(value, enum.Enum):
            self.add(_of_object(f"{key}.", value, f"{shown}."), id(value))
            if of_the_script(type(value)):
                self.add(_of_object(f"{key}.__class__.", type(value), f"{type(value).__name__}."), id(type(value)))

    def _elements(self, key: str, shown: str, holder: Any) -> None:
        if len(holder) > _FEW or id(holder) in self._seen:
            return
        self._seen.add(id(holder))
        for name, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            self._look(f"{key}[{name!r}]", f"{shown}[{name!r}]", value)


def _of_dict(key: str, shown: str, space: dict[str, Any]) -> Space:
    return Space(key, shown, lambda: space, space.__setitem__, raw=space)


def _of_frame(frame: FrameType, count: int) -> Space:
    name = f"{frame.f_code.co_name}{count if count > 1 else ''}()."
    return Space(name, "", functools.partial(locals_of, frame), functools.partial(bind_local, frame), frame=frame)


def _of_object(key: str, thing: Any, shown: str = "") -> Space:
    """Make a space of the attributes of an object or a class."""
    if isinstance(thing, type):
        return Space(key, shown, lambda: _of_class(thing), lambda name, value: setattr(thing, name, value), thing)
    if isinstance(thing, DataLoader):
        made_of = ("dataset", "sampler", "batch_sampler", "generator")
        return Space(
            key, shown, lambda: {name: getattr(thing, name, None) for name in made_of}, thing.__setattr__, thing
        )
    slots = [
        name
        for kind in type(thing).__mro__
        for name, one in vars(kind).items()
        if isinstance(one, types.MemberDescriptorType)
    ]
    space = getattr(thing, "__dict__", None)
    if not slots:
        space = {} if space is None else space
        return Space(key, shown, lambda: space, space.__setitem__, thing, space)

    def read() -> dict[str, Any]:
        return {**(space or {}), **{name: getattr(thing, name) for name in slots if hasattr(thing, name)}}

    return Space(key, shown, read, lambda name, value: object.__setattr__(thing, name, value), thing)


def _of_class(kind: type) -> dict[str, Any]:
    """Return the attributes of a class without methods, properties and others that every class statement makes."""
    leave = (
        types.FunctionType,
        staticmethod,
        classmethod,
        property,
        types.MemberDescriptorType,
        types.GetSetDescriptorType,
    )
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith(("__", "_abc_")) and not isinstance(value, leave)
    }


def _of_part(key: str, module: torch.nn.Module) -> Space:
    """Make a space of a protected module's attributes beside its tensors and submodules."""

    def read() -> dict[str, Any]:
        return {name: value for name, value in vars(module).items() if name not in _OF_MODULES}

    return Space(key, key, read, vars(module).__setitem__, module, vars(module))


def _of_function(key: str, function: types.FunctionType, shown: str) -> Space:
    """Make a space of a function's closure, its defaults and its attributes."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def read() -> dict[str, Any]:
        return {**vars(function), **dict(_filled(cells)), **_defaults(function)}

    def bind(name: str, value: Any) -> None:
        if name in cells:
            cells[name].cell_contents = value
        elif name == _DEFAULTS:
            function.__defaults__, function.__kwdefaults__ = value
        else:
            vars(function)[name] = value

    # a variable of its closure belongs to the enclosing function
    return Space(key, "" if cells else shown, read, bind, function)


def _of_context(key: str, variable: contextvars.ContextVar[Any], shown: str) -> Space:
    def read() -> dict[str, Any]:
        value = variable.get(_ABSENT)
        return {} if value is _ABSENT else {"value": value}

    return Space(key, shown, read, lambda _, value: variable.set(value) and None, variable)


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    """Return a function's defaults if a call may change one, as it may a list."""
    both = function.__defaults__, function.__kwdefaults__
    values = [*(both[0] or ()), *(both[1] or {}).values()]
    return {} if all(value is None or isinstance(value, int | float | str) for value in values) else {_DEFAULTS: both}


def _filled(cells: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, cell in cells.items():
        try:
            yield name, cell.cell_contents
        except ValueError:  # the variable is unassigned
            continue
