"""How a local variable of a function that runs is written. See torch_private.py."""

from __future__ import annotations

import ctypes
import sys
from types import FrameType
from typing import Any

from ftrun.worker.runtime.torch_private import MESSAGE, Private

NAMES: list[Private] = []


def bind_local(frame: FrameType, name: str, value: Any) -> None:
    """Bind a local variable of a function whose frame is on a stack, a variable of a closure among them."""
    if sys.version_info >= (3, 13):
        frame.f_locals[name] = value  # written through, as PEP 667 has it
        return
    frame.f_locals[name] = value  # in a copy, which is made anew at each look
    ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


if sys.version_info < (3, 13):
    NAMES.append(
        Private(
            "ctypes:pythonapi", ("PyFrame_LocalsToFast",), "CPython", MESSAGE,
            "give a replacement the local variables of its predecessor's loop", "they are named as not known",
        )
    )  # fmt: skip
