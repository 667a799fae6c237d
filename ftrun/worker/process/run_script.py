"""Runs the user's program as the interpreter would: in a module `__main__` that stays what it is until the process ends.

runpy's functions would not do: theirs know the script by the path as it was typed, which is wrong after a chdir, and take
`__main__` away when the last line has run, while threads and atexit functions may still pickle what it holds.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import pkgutil
import runpy
import sys
import types
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

_before: list[types.ModuleType] = []  # the interpreter's own __main__: its code runs us


def run_script(target: str) -> None:
    """Run a file, or a folder or archive that holds a `__main__.py`. sys.argv is the caller's business, sys.path ours."""
    path = os.path.abspath(target)
    if pkgutil.get_importer(path) is not None:
        runpy.run_path(target, run_name="__main__")  # which puts the folder or archive first
        return
    _look_first_in(os.path.dirname(os.path.realpath(path)))  # as Python does: the folder of what a link leads to
    if target.endswith(".pyc"):
        runpy.run_path(target, run_name="__main__")
        return
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    _run(code, path, None, SourceFileLoader("__main__", path))


def run_module(name: str) -> None:
    """Run a module as `python -m` does. Errors: ImportError when there is no such module or it is not to be run."""
    _look_first_in(os.getcwd())
    sys.argv[0] = "-m"  # what the interpreter says while a package's __init__ runs
    spec = _found(name)
    if spec.submodule_search_locations is not None:
        spec = _found(f"{name}.__main__", f"; {name} is a package and cannot be run as a program")
    code = spec.loader.get_code(spec.name) if hasattr(spec.loader, "get_code") else None  # type: ignore[union-attr]
    if code is None:
        raise ImportError(f"there is no Python code for module {spec.name}", name=spec.name)
    sys.argv[0] = spec.origin or spec.name
    _run(code, spec.origin, spec, spec.loader)


def _look_first_in(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH, since Python 3.11
        sys.path.insert(0, folder)


def _found(name: str, hint: str = "") -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package's own import failed
        spec = None
    except ValueError:
        spec = None  # imported already, by something that left no spec
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name}{hint}", name=name)
    return spec


def _run(code: types.CodeType, file: str | None, spec: ModuleSpec | None, loader: Any) -> None:
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __loader__=loader, __spec__=spec, __file__=file)
    main.__package__ = None if spec is None else spec.parent
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    if sys.version_info < (3, 15):
        main.__dict__["__cached__"] = None if spec is None else spec.cached
    _before.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    exec(code, main.__dict__)  # noqa: S102 the user's program: what we are for
