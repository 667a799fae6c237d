"""Who called: the script's line for an error, and whether it is DistributedDataParallel's constructor."""

from __future__ import annotations

import inspect
import os
import sysconfig

import torch

from ftrun.core.paths import OWN_FILES

_LIBRARIES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
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


def is_script(file: str) -> bool:
    """Is this a file of the user's, as opposed to torch's, ftrun's and the interpreter's own?"""
    return not file.startswith((*_NOT_THE_SCRIPT, "<frozen", *_LIBRARIES))


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
