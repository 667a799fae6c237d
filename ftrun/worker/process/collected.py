"""Detect whether Python itself collects the items of a loop, as a comprehension does, or `sum()` over a generator.

Nobody can restore such a half-built result: in a replacement it begins anew.
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
from types import FrameType

from ftrun.worker.link.callers import frames
from ftrun.worker.variables.loop_names import parsed

_FRAMES = ("<listcomp>", "<setcomp>", "<dictcomp>")  # a comprehension has a frame of its own until Python 3.11
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)
_ONE_BY_ONE = ("next", "send", "throw", "__next__")  # the caller of one of these keeps its result in the script


def collector() -> str:
    """Return a readable name of the construct that collects our iterator's items; "" = the script takes them one by one."""
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
    """Return the call of a C function that consumes a generator; Python 3.10 does not tell where in a line it is."""
    if not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL"):
        return ""  # a `for`, which may have the same position: that of its iterable
    at, nodes = _running(frame)
    for node in nodes:
        if isinstance(node, ast.Call) and _place(node) == at:
            name = ast.unparse(node.func)
            return "" if name.rpartition(".")[2] in _ONE_BY_ONE else f"{name}()"
    return ""


def _running(frame: FrameType) -> tuple[tuple[int | None, ...], list[ast.AST]]:
    """Return a frame's position in its source, and all nodes of that source."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None:
        return (), []
    tree = parsed("".join(linecache.getlines(frame.f_code.co_filename)))
    return list(positions())[frame.f_lasti // 2], [*ast.walk(tree)] if tree is not None else []


def _place(node: ast.AST) -> tuple[int | None, ...]:
    return tuple(getattr(node, name, None) for name in ("lineno", "end_lineno", "col_offset", "end_col_offset"))
