"""Read and bind local variables of a running function; see torch_private.py for the rules.

Before Python 3.13 `frame.f_locals` writes all variables of a function into the dict that `locals()` returns to the script:
`args = locals()` would also get later bindings, and objects that the script drops would live on. So these functions restore the
dict's content. Its place in memory is fixed, since those Pythons do not change any more.
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
# offsets from a frame object to the pointer to that dict; from 3.11 on through the interpreter's own frame
_WAY = {(3, 10): (_HEAD + 40,), (3, 11): (_HEAD + 8, 24), (3, 12): (_HEAD + 8, 40)}


def has_own_locals(frame: FrameType) -> bool:
    """Does the frame belong to a function, a class statement or an exec with two dicts? Otherwise its variables are a module's."""
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return True
    found = frame.f_locals
    # while a comprehension runs in a module, Python 3.12 makes a new object with its variables at each look
    return found is not frame.f_globals and found is frame.f_locals


def dict_of_locals(frame: FrameType) -> dict[str, Any] | None:
    """Return the dict that each look at `f_locals` writes into, with its content as before the call; None if there is none."""
    if not (_IN_A_DICT and frame.f_code.co_flags & inspect.CO_OPTIMIZED):
        return None
    before = _as_taken(frame)
    found = frame.f_locals
    leave(found, before)
    return found


def leave(found: dict[str, Any], before: dict[str, Any]) -> None:
    """Restore the earlier content of a dict."""
    found.clear()
    found.update(before)


def _as_taken(frame: FrameType) -> dict[str, Any]:
    """Return a copy of the dict as the script has it; empty if the script has not called `locals()`."""
    address = id(frame)
    for offset in _WAY[sys.version_info[:2]]:
        address = ctypes.c_void_p.from_address(address + offset).value or 0
    return dict(ctypes.cast(address, ctypes.py_object).value) if address else {}


def locals_of(frame: FrameType) -> Mapping[str, Any]:
    """Return the present variables; from Python 3.13 on a mapping that always has the present ones."""
    if not (_IN_A_DICT and frame.f_code.co_flags & inspect.CO_OPTIMIZED):
        return frame.f_locals
    before = _as_taken(frame)
    found = frame.f_locals
    now = dict(found)
    leave(found, before)
    return now


def bind_local(frame: FrameType, name: str, value: Any) -> None:
    """Bind a local variable, which may belong to a closure, of a function whose frame is on a stack."""
    if not (_IN_A_DICT and frame.f_code.co_flags & inspect.CO_OPTIMIZED):
        frame.f_locals[name] = value  # writes through: it is a proxy, or the namespace of a class or a module itself
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
