"""Hide from a script that its worker has imported modules, torch among them, before the script began.

Under torchrun a worker is `python -u script`: the script's folder comes first for every import, torch's own among them, and
torch reads its variables when the script imports it. Here the fork server has imported torch long before. So in a forked worker
- a name in the script's folder that the fork server has found elsewhere, and a variable that the script's text sets above its
  import of torch, make the worker start as a fresh interpreter (`why_not_forked`);
- modules that a fresh worker would not have yet are out of `sys.modules` until somebody imports them, and come back if that
  import finds the same file (`Hidden`). If the script imports torch, or before it another module outside the standard library, and has
  changed a variable that an import read, or put a folder on sys.path in which other modules are found, then the process begins
  anew, as a fresh interpreter.
A fresh interpreter has imported less: there `make_room` forgets modules that the script's folder shadows.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import (
    ExtensionFileLoader,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ClassVar

from ftrun.core.environment import RANK_KEYS
from ftrun.core.system import visible
from ftrun.worker.process import run_script
from ftrun.worker.torch_compat.torch_private import watch_environment

# Variables that native libraries read while they load, where Python cannot see it: the getenv calls of `import torch`.
_NATIVE = re.compile(
    "(G?OMP|KMP|GOMP|MKL|MKLDNN|DNNL|ONEDNN|OPENBLAS|GOTO|BLIS|NPY|KINETO|PYTORCH)_"
    "|TORCH_(ALLOW|BLAS|CPP|CUSTOM|DISTRIBUTED_DEBUG|LINALG|ROCM|SHOW_CPP)"
)
_FILES = (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader)
_TORCH = "torch"
_SET = re.compile(rb"""environ(?:\[|\.setdefault\(|\.update\()[^=\n]*?["'](\w+)["']""")
_IMPORTS_TORCH = re.compile(rb"^\s*(?:import\s+(?:[\w.]+\s*,\s*)*|from\s+)torch\b", re.MULTILINE)
_LONGEST = 1 << 20  # bytes of a script that are searched
_MARK = "fresh-workers"  # file in the run directory: a worker had to begin anew, so start the next ones as fresh interpreters
AGAIN = "a worker of this run had to begin anew"

_plain = type(os.environ)
_answers: dict[tuple[object, ...], str] = {}  # of `why_not_forked`


class _Reads(_plain):  # type: ignore[misc, valid-type]
    """os.environ while the fork server imports: it notes the variables that are read. Iteration over all of them does not count."""

    asked: ClassVar[set[str]] = set()
    passed: ClassVar[Counter[str]] = Counter()

    def __iter__(self) -> Iterator[str]:
        for key in _plain.__iter__(self):
            self.passed[key] += 1
            yield key

    def __getitem__(self, key: str) -> str:
        self._note(key)
        return str(_plain.__getitem__(self, key))

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return bool(_plain.__contains__(self, key))

    def _note(self, key: Any) -> None:
        if self.passed[key] > 0:
            self.passed[key] -= 1
        elif isinstance(key, str) and not key.startswith("FTRUN_"):
            self.asked.add(key)


_common: frozenset[str] = frozenset()  # modules that a fresh worker has, too
_with_torch: frozenset[str] = frozenset()  # those that `import torch` brings
_started: frozenset[str] = frozenset()  # those that a plain interpreter begins with, whose names nobody can shadow


def begin(started: Iterable[str]) -> None:
    """Note the fork server's modules before its imports for workers. `started`: the modules that its interpreter began with."""
    global _common, _started
    _common, _started = frozenset(sys.modules), frozenset(started)
    watch_environment(_Reads)


def imported_torch() -> None:
    """Note the modules that torch brings, after its import and before any other."""
    global _with_torch
    _with_torch = frozenset(sys.modules) - _common


def end() -> None:
    """Stop watching the environment, after the last import."""
    watch_environment(_plain)


def _is_read(name: str) -> bool:
    return name in _Reads.asked or _NATIVE.match(name) is not None


def why_not_forked(spec: Mapping[str, Any]) -> str:
    """Return why this worker cannot be a fork of this process, "" if it can."""
    if spec["kind"] == "program":
        return ""
    if os.path.exists(os.path.join(spec["run_dir"], _MARK)):
        return AGAIN
    kind, target = spec["kind"], spec["argv"][0]
    # computed again only if something changed: each fork waits for this, and the script may lie on a slow file system
    key = kind, target, *map(_changed, (target, run_script.folder_of(kind, target)))
    if key not in _answers:
        _answers[key] = _why_not_forked(kind, target, spec["env"])
    return _answers[key]


def _changed(path: str | None) -> int:
    """Return when a file or folder last changed, 0 = it does not exist."""
    try:
        return 0 if path is None else os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _why_not_forked(kind: str, target: str, variables: Mapping[str, str]) -> str:
    names = shadowed(run_script.folder_of(kind, target))
    if names:
        return f"modules of the script's are called {', '.join(names)}"
    if kind == "script" and _TORCH in sys.modules:
        try:
            with open(target, "rb") as file:
                above = _IMPORTS_TORCH.split(file.read(_LONGEST), maxsplit=1)[0]
        except OSError:
            return ""
        found = [name for name in map(bytes.decode, _SET.findall(above)) if _is_read(name) and name not in variables]
        if found:
            return f"the script may set {', '.join(found)} above its import of torch"
    return ""


def mark(run_dir: Path) -> bool:
    """Make the next workers of this run start as fresh interpreters. False: another worker has done so already."""
    try:
        (run_dir / _MARK).touch(exist_ok=False)
    except OSError:
        return False
    return True


def shadowed(folder: str | None, among: Iterable[str] | None = None) -> list[str]:
    """Return imported top-level modules (or `among` them) that an import would find in this folder or archive, were it the first."""
    if folder is None:
        return []
    names = {name for name in sys.modules if "." not in name} - _started if among is None else {*among}
    try:
        names &= {entry.partition(".")[0] for entry in os.listdir(folder)}
    except NotADirectoryError:
        pass  # an archive: `find_spec` below tries each name
    except OSError:
        return []
    names -= {*sys.builtin_module_names, "__main__", "__mp_main__"}
    return sorted(name for name in names if _is_other(PathFinder.find_spec(name, [folder]), sys.modules.get(name)))


def _is_other(found: ModuleSpec | None, module: ModuleType | None) -> bool:
    """Does an import find another file than the module's? A folder without code (a namespace) hides no module."""
    if found is None or found.origin is None:
        return False
    known = getattr(getattr(module, "__spec__", None), "origin", None)
    if known in (found.origin, "built-in", "frozen"):
        return False
    return known is None or os.path.realpath(known) != os.path.realpath(found.origin)


def make_room(folder: str | None, started: Iterable[str]) -> None:
    """In a fresh interpreter: forget the modules that the script's folder shadows, and those that hold objects of theirs.

    The script's imports then find the same files as without ftrun. ftrun's code keeps its modules. `started`: as in `begin`.
    """
    global _started
    _started = frozenset(started)
    gone = {*shadowed(folder)} - {"ftrun"}
    kept = {*_started, "ftrun", "__main__", *sys.builtin_module_names}
    size = 0
    while gone and size != len(gone):
        size = len(gone)
        for name, module in [*sys.modules.items()]:
            top = name.partition(".")[0]
            if top not in gone and top not in kept and any(_comes_from(value, gone) for value in vars(module).values()):
                gone.add(top)
    for name in [name for name in sys.modules if name.partition(".")[0] in gone]:
        del sys.modules[name]


def _comes_from(value: object, modules: set[str]) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in modules
    return isinstance(value, type | FunctionType) and str(value.__module__).partition(".")[0] in modules


class Hidden:
    """A finder at the head of sys.meta_path; it hides the modules that a fresh worker would not have until somebody imports them.

    `ours`: variables that the script does not set; `begin_anew(why)` makes this process a fresh interpreter.
    """

    def __init__(self, ours: Iterable[str], begin_anew: Callable[[str], None]) -> None:
        self._pid = os.getpid()
        self._begin_anew = begin_anew
        self._path = [*sys.path]
        ours = {*ours, *RANK_KEYS, visible.VARIABLE}  # torch reads the last when it first uses a device
        self._read = [name for name in _Reads.asked if name not in ours]
        self._variables = self._values()
        self._modules: dict[str, dict[str, ModuleType]] = {}
        for name in [*sys.modules] if _common else ():
            top = name.partition(".")[0]
            if top in _common or not _is_of_a_file(sys.modules.get(top) or self._top(top)):
                continue
            self._modules.setdefault(top, {})[name] = sys.modules.pop(name)
        if self._modules:
            sys.meta_path.insert(0, self)

    def _top(self, name: str) -> ModuleType | None:
        return self._modules.get(name, {}).get(name)

    def _values(self) -> dict[str, str | None]:
        names = [*self._read, *filter(_NATIVE.match, _plain.__iter__(os.environ))]
        return {name: os.environ.get(name) for name in names}

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a hidden module as an import would, with a loader that reveals it; return None for any other name."""
        if name not in self._modules:
            return None
        found = self._elsewhere(name)
        module = self._modules[name][name]
        if found is None or not isinstance(found.loader, _FILES) or _is_other(found, module):
            return found
        own = module.__spec__

        def reveal(module: ModuleType) -> None:
            # after its import of torch the script may have begun what a process cannot repeat, and may set variables freely
            if _TORCH in self._modules and name not in sys.stdlib_module_names and os.getpid() == self._pid:
                self._compare(name)
            self._bring_back(name)
            module.__spec__ = own

        found.loader.create_module = lambda spec: module  # type: ignore[method-assign]
        found.loader.exec_module = reveal  # type: ignore[method-assign]
        return found

    def _elsewhere(self, name: str) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self:
                found = finder.find_spec(name, None, None)
                if found is not None:
                    return found
        return None

    def _bring_back(self, name: str) -> None:
        for top in [top for top in self._modules if top in _with_torch] if name == _TORCH else [name]:
            for inner, module in self._modules.pop(top, {}).items():
                sys.modules.setdefault(inner, module)

    def _compare(self, name: str) -> None:
        """Begin anew if this module, which the script imports now, would find other modules or read other variables than before."""
        now = self._values()
        changed = sorted(name for name in {*now, *self._variables} if now.get(name) != self._variables.get(name))
        other = {*self._modules} & {*sys.modules} - {name}  # the script has imported its own
        for folder in sys.path:
            if folder not in self._path:
                found = shadowed(folder, self._modules)
                other |= {known for known in found if _is_other(self._elsewhere(known), self._top(known))}
        said = [f"sets {', '.join(changed)}"] if changed else []
        said += [f"has modules called {', '.join(sorted(other))}"] if other else []
        if said:
            self._begin_anew(f"the script {' and '.join(said)} before it imports {name}")


def _is_of_a_file(module: ModuleType | None) -> bool:
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _FILES)
