"""Run the user's program as the interpreter would: in a module `__main__` that exists until the process ends.

runpy's functions would not do: they keep the script's path as typed, which is wrong after a chdir, and remove `__main__`
when the last line has run, while threads and atexit functions may still pickle its objects.
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


def folder_of(kind: str, target: str) -> str | None:
    """Return the folder or archive that Python puts first on sys.path, None if it puts none there."""
    safe = getattr(sys.flags, "safe_path", False)  # PYTHONSAFEPATH, since Python 3.11
    if kind == "module":
        return None if safe else os.getcwd()
    path = os.path.abspath(target)
    if pkgutil.get_importer(path) is not None:
        return path
    return None if safe else os.path.dirname(os.path.realpath(path))  # the folder of a link's target


def run_script(target: str) -> None:
    """Run a file, or a folder or archive that holds a `__main__.py`. The caller sets sys.argv, this function sets sys.path."""
    path = os.path.abspath(target)
    folder = folder_of("script", target)
    if folder == path:
        runpy.run_path(target, run_name="__main__")  # it puts the folder or archive first
        return
    _look_first_in(folder)
    if target.endswith(".pyc"):
        runpy.run_path(target, run_name="__main__")
        return
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:  # the file existed when the run began
        print(f"{sys.executable}: can't open file {path!r}: {error}", file=sys.stderr)
        sys.exit(2)
    code = compile(source, path, "exec", dont_inherit=True)
    _run(code, path, None, SourceFileLoader("__main__", path))


def run_module(name: str) -> None:
    """Run a module as `python -m` does.

    Raises:
        SystemExit: With Python's sentence if the module cannot be run.
    """
    _look_first_in(folder_of("module", name))
    sys.argv[0] = "-m"  # the interpreter's value while a package's __init__ runs
    spec = _found(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _found(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if spec is not None and hasattr(spec.loader, "get_code") else None  # type: ignore[union-attr]
    if spec is None or code is None:
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)  # it fails, too, and tells why
        except ImportError as error:
            sys.exit(f"{sys.executable}: {error}")
        return
    sys.argv[0] = spec.origin or spec.name
    _run(code, spec.origin, spec, spec.loader)


def _look_first_in(folder: str | None) -> None:
    if folder is not None:
        sys.path.insert(0, folder)


def _found(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package's own import failed
    except ValueError:
        pass  # already imported, without a spec
    return None


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
