"""How local variables of a function that runs are read and bound. See torch_private.py.

Before Python 3.13 `frame.f_locals` writes all variables of a function into the dict that `locals()` has given to the script, or will
give: `args = locals()` would hold what is bound later, too, and what the script lets go would live on. Hence that dict is left as it
was found. Where it lies is known of those Pythons, which do not change any more.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from ftrun.worker.torch_compat.torch_private import MESSAGE, Private

NAMES: list[Private] = []
_IN_A_DICT = sys.version_info < (3, 13)  # until PEP 667
_HEAD = object.__basicsize__
# from a frame object to the pointer to that dict: by way of the interpreter's own frame, from 3.11 on
_WAY = {(3, 10): (_HEAD + 40,), (3, 11): (_HEAD + 8, 24), (3, 12): (_HEAD + 8, 40)}


def has_own_locals(frame: FrameType) -> bool:
    """Are its variables those of a function, of a class statement or of exec with two dicts? Else they are a module's."""
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return True
    found = frame.f_locals
    # where a comprehension runs in a module they have its variables beside, in an object of their own at each look (Python 3.12)
    return found is not frame.f_globals and found is frame.f_locals


def dict_of_locals(frame: FrameType) -> dict[str, Any] | None:
    """The dict that each look at `f_locals` writes into; None = there is none such. Nothing was written into it by this call."""
    if not (_IN_A_DICT and frame.f_code.co_flags & inspect.CO_OPTIMIZED):
        return None
    before = _as_taken(frame)
    found = frame.f_locals
    leave(found, before)
    return found


def leave(found: dict[str, Any], before: dict[str, Any]) -> None:
    """Make it again what it was."""
    found.clear()
    found.update(before)


def _as_taken(frame: FrameType) -> dict[str, Any]:
    """What the script has of the dict, if it asked for it."""
    address = id(frame)
    for offset in _WAY[sys.version_info[:2]]:
        address = ctypes.c_void_p.from_address(address + offset).value or 0
    return dict(ctypes.cast(address, ctypes.py_object).value) if address else {}


def locals_of(frame: FrameType) -> Mapping[str, Any]:
    """The variables as they are now; from Python 3.13 on as they are whenever it is asked."""
    if not (_IN_A_DICT and frame.f_code.co_flags & inspect.CO_OPTIMIZED):
        return frame.f_locals
    before = _as_taken(frame)
    found = frame.f_locals
    now = dict(found)
    leave(found, before)
    return now


def bind_local(frame: FrameType, name: str, value: Any) -> None:
    """Bind a local variable of a function whose frame is on a stack, a variable of a closure among them."""
    if not (_IN_A_DICT and frame.f_code.co_flags & inspect.CO_OPTIMIZED):
        frame.f_locals[name] = value  # written through: it is a proxy, or the space of a class or a module itself
        return
    before = _as_taken(frame)
    found = frame.f_locals
    found[name] = value
    ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    leave(found, before)


NAMES += [
    Private(
        "ctypes:pythonapi", ("PyFrame_LocalsToFast",), "CPython", MESSAGE,
        "give a replacement the local variables of its predecessor's loop", "they are named as not known", until=(3, 13),
    ),
    Private(
        "types:FrameType", ("f_locals",), "CPython", MESSAGE,
        "find in a frame's memory the dict that `locals()` has given to the script, to leave it as it is",
        "the script's dict holds variables that were bound later", until=(3, 13),
    ),
]  # fmt: skip
