"""Who called: the script's line for an error, and whether it is DistributedDataParallel's constructor."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Iterator

import torch

from ftrun.core.paths import OWN_FILES

_LIBRARIES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_COMMANDS = sysconfig.get_path("scripts") + os.sep
_INIT_CODE = torch.nn.parallel.DistributedDataParallel.__init__.__code__


def inside_ddp_constructor() -> bool:
    """Is this call made by DistributedDataParallel's constructor?"""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _INIT_CODE:
            return True
        frame = frame.f_back
    return False


def inside_compiled() -> bool:
    """Is this call made below a function that torch.compile, or torch's switch for it, has wrapped?"""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/_dynamo/eval_frame.py"):
            return True
        frame = frame.f_back
    return False


_NOT_THE_SCRIPT = (OWN_FILES, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)


_program: tuple[object, dict[str, bool]] = (None, {})  # the module __main__, and what was found of files since it is that


def is_script(file: str) -> bool:
    """Is this a file of the user's, as opposed to torch's, ftrun's, the interpreter's own and libraries?

    The top package of the program is the user's wherever it lies. What lies in a folder that packages were installed to is a library,
    also when PYTHONPATH names that folder.
    """
    global _program
    main = sys.modules.get("__main__")
    if _program[0] is not main:
        _program = main, {}
    found = _program[1].get(file)
    if found is None:
        found = _program[1][file] = _is_of_the_program(file, main)
    return found


def _is_of_the_program(file: str, main: types.ModuleType | None) -> bool:
    if file.startswith((*_NOT_THE_SCRIPT, "<frozen")):
        return False
    if file == getattr(main, "__file__", None) or file.startswith(tuple(_folders_of(main))):
        return True
    return not file.startswith(_LIBRARIES) and not any(
        file.startswith(folder + os.sep) and _has_packages(folder) for folder in sys.path[1:]
    )


def _folders_of(main: types.ModuleType | None) -> Iterator[str]:
    """Those of the program's top package: of `-m`, of a command that pip made, of a script among installed files."""
    file = getattr(main, "__file__", None) or ""
    packages = {(getattr(main, "__package__", None) or "").partition(".")[0]} - {""}
    if file.startswith(_COMMANDS):
        packages |= {one.__module__.partition(".")[0] for one in vars(main).values() if isinstance(one, types.FunctionType)}
        packages -= {"__main__", *sys.stdlib_module_names}
    for name in packages:
        yield from (folder + os.sep for folder in getattr(sys.modules.get(name), "__path__", ()))
    beside = os.path.dirname(file) + os.sep
    if file.startswith(_LIBRARIES) and beside not in _LIBRARIES:
        yield beside


@functools.cache
def _has_packages(folder: str) -> bool:
    """Were packages installed to it?"""
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:  # an archive
        return False


def module_of(kind: type) -> str:
    """Name of the module that a class says it is of; "" for one of Cython's, which says it of its objects and not of itself."""
    name = kind.__module__
    return name if isinstance(name, str) else ""


def caller() -> str:
    """File and line of the script that led here; of another library where the script is none of the user's files."""
    frame = inspect.currentframe()
    library = "?"
    while frame is not None:
        name = frame.f_code.co_filename
        if is_script(name):
            return f"{name}:{frame.f_lineno}"
        if library == "?" and not name.startswith(_NOT_THE_SCRIPT):
            library = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return library
