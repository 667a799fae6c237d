"""Who called: the script's line for an error, and whether it is DistributedDataParallel's constructor."""

from __future__ import annotations

import inspect
import os

import torch

from ftrun.core.paths import OWN_FILES

_INIT_CODE = torch.nn.parallel.DistributedDataParallel.__init__.__code__


def inside_ddp_constructor() -> bool:
    """Is this call made by DistributedDataParallel's constructor?"""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _INIT_CODE:
            return True
        frame = frame.f_back
    return False


_NOT_THE_SCRIPT = (OWN_FILES, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)


def caller() -> str:
    """File and line of the script that led here."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_THE_SCRIPT):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
