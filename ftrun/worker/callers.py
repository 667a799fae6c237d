"""Who called: the script's line for an error, and whether it is DistributedDataParallel's constructor."""

from __future__ import annotations

import os
import sys

import torch

_INIT_CODE = torch.nn.parallel.DistributedDataParallel.__init__.__code__


def inside_ddp_constructor() -> bool:
    """Is this call made by DistributedDataParallel's constructor?"""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _INIT_CODE:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_NOT_THE_SCRIPT = tuple(os.path.dirname(os.path.abspath(f)) + os.sep for f in (__file__, torch.__file__))


def caller() -> str:
    """File and line of the script that led here."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_THE_SCRIPT):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
