"""Does Python itself collect what a loop of the script gives? A comprehension does, and `sum()` over a generator.

What it has collected lies where nobody can put it back: in a replacement it begins anew.
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
from types import FrameType

from ftrun.worker.link.callers import frames
from ftrun.worker.state.loop_names import parsed

_FRAMES = ("<listcomp>", "<setcomp>", "<dictcomp>")  # a comprehension has a frame of its own until Python 3.11
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)
_ONE_BY_ONE = ("next", "send", "throw", "__next__")  # who calls one of them keeps what it gives in the script


def collector() -> str:
    """What the script's code collects with that asks our iterator, as a person reads it; "" = it goes on one by one."""
    for frame in frames():
        found = _collects(frame)
        if found or not frame.f_code.co_flags & inspect.CO_GENERATOR or frame.f_back is None:
            return found
        found = _call(frame.f_back)
        if found:
            return found
    return ""


def _collects(frame: FrameType) -> str:
    if frame.f_code.co_name in _FRAMES:
        return "a comprehension"
    at, nodes = _running(frame)
    for node in nodes:
        if isinstance(node, _COMPREHENSIONS) and at in (_place(node), *(_place(part.iter) for part in node.generators)):
            return "a comprehension"
    return ""


def _call(frame: FrameType) -> str:
    """A call of what is no Python, which asks a generator; Python 3.10 does not say where in a line it is."""
    if not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL"):
        return ""  # a `for`, which may be in the same place: that of what it goes over
    at, nodes = _running(frame)
    for node in nodes:
        if isinstance(node, ast.Call) and _place(node) == at:
            name = ast.unparse(node.func)
            return "" if name.rpartition(".")[2] in _ONE_BY_ONE else f"{name}()"
    return ""


def _running(frame: FrameType) -> tuple[tuple[int | None, ...], list[ast.AST]]:
    """Where in its source a frame is, and what that is made of."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None:
        return (), []
    tree = parsed("".join(linecache.getlines(frame.f_code.co_filename)))
    return list(positions())[frame.f_lasti // 2], [*ast.walk(tree)] if tree is not None else []


def _place(node: ast.AST) -> tuple[int | None, ...]:
    return tuple(getattr(node, name, None) for name in ("lineno", "end_lineno", "col_offset", "end_col_offset"))
