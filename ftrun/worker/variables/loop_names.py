"""Tell from a script's source, without running it, which names of a loop carry a value from one iteration to the next.

A loop carries a name if an iteration reads it before it writes it, and writes it somewhere: a counter, a running mean, a batch that
was fetched ahead. A replacement may have another value there before any look has detected a change. A value that each iteration makes
anew is no state.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
import warnings
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ftrun.worker.torch_compat.frames_private import has_own_locals

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_CLOCKS = ("time", "perf_counter", "monotonic", "time_ns", "perf_counter_ns", "monotonic_ns")
_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))  # from Python 3.11 on
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
_FOR = ("iter", "target", "body", "orelse")  # the body is assumed to run: an empty loop is rare
_ORDER: dict[type, tuple[str, ...]] = {  # order of evaluation, where it differs from the order of the fields
    **dict.fromkeys((ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr), ("value", "target", "targets")),
    **dict.fromkeys((ast.For, ast.AsyncFor), _FOR),
    **dict.fromkeys(_COMPREHENSIONS, ("generators", "elt", "key", "value")),
    ast.comprehension: ("iter", "target", "ifs"),
}


class LoopNames(NamedTuple):
    """Names of the loops around a line.

    `carried`: any of the loops carries them. `fresh`: the innermost loop writes them, and no loop carries them. `always`: each iteration of
    the innermost loop writes them before it reads them. `outside`: only an outer loop writes them.
    """

    carried: frozenset[str] = frozenset()
    fresh: frozenset[str] = frozenset()
    always: frozenset[str] = frozenset()
    outside: frozenset[str] = frozenset()


def names_of(frame: FrameType) -> LoopNames:
    """Return the names for the line that a frame is at; none if its source cannot be read."""
    return loop_names("".join(linecache.getlines(frame.f_code.co_filename)), frame.f_lineno)


@functools.lru_cache(64)  # a function with a loop is called in each epoch
def loop_names(source: str, line: int) -> LoopNames:
    tree = parsed(source)
    nodes = ast.walk(tree) if tree is not None else ()
    around = [node for node in nodes if isinstance(node, _LOOPS) and node.lineno <= line <= (node.end_lineno or 0)]
    if not around:
        return LoopNames()
    *outer, inner = [_Iteration(loop) for loop in sorted(around, key=lambda node: node.lineno)]
    carried = inner.carried.union(*(each.carried for each in outer))
    outside = frozenset[str]().union(*(each.written for each in outer)) - inner.written
    return LoopNames(frozenset(carried), frozenset(inner.written - carried), frozenset(inner.sure - inner.early), outside)


@functools.lru_cache(maxsize=4)
def parsed(source: str) -> ast.Module | None:
    """Parse source; return None if it is not Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python has warned of an escape like "\\d" already, by the name of the file
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError):
            return None


def made_anew(frame: FrameType) -> frozenset[str]:
    """Return the names that a frame's loop writes in each iteration before anything reads them."""
    always = names_of(frame).always
    # a function that the loop of a module calls may read a name before the loop writes it
    return always if has_own_locals(frame) or not always else always - {*read_in_functions(frame.f_code)}


def read_in_functions(module: CodeType) -> Iterator[str]:
    for code in filter(inspect.iscode, module.co_consts):
        if code.co_name[:1] != "<" or code.co_name == "<lambda>":  # not a comprehension of the module itself
            yield from (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
            yield from read_in_functions(code)


def _dotted(node: Any) -> str:
    """Return `x` or `self.x`; "" for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


class _Iteration:
    """One iteration, in the order in which Python evaluates it.

    Attributes:
        written: Names that may be written.
        sure: Names that are certainly written so far.
        early: Names that may be read before they are written.
    """

    def __init__(self, loop: ast.For | ast.AsyncFor | ast.While) -> None:
        self.written: set[str] = set()
        self.sure: set[str] = set()
        self.early: set[str] = set()
        self._clocks: set[str] = set()  # names that hold a clock's time, which is no state of a training
        self._visit([loop.test if isinstance(loop, ast.While) else loop.target, *loop.body])

    @property
    def carried(self) -> set[str]:
        return (self.early & self.written) - self._clocks

    def _write(self, name: str | None) -> None:
        if name:
            self.sure.add(name)
            self.written.add(name)

    def _read(self, name: str) -> None:
        if name and name not in self.sure:
            self.early.add(name)

    def _one_of(self, *ways: Any) -> None:
        """Visit alternative branches; a name is certainly written only if all of them write it."""
        before, ends = self.sure, []
        for way in ways:
            self.sure = {*before}
            self._visit(way)
            ends.append(self.sure)
        self.sure = set.intersection(*ends)

    def _visit(self, node: Any) -> None:
        if isinstance(node, list):
            for each in node:
                self._visit(each)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._write(node.name)  # its own variables do not belong to the loop
        elif isinstance(node, ast.If):
            self._visit(node.test)
            self._one_of(node.body, node.orelse)
        elif isinstance(node, ast.Match):
            self._visit(node.subject)
            last = node.cases[-1]
            takes_all = last.guard is None and isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
            self._one_of(*node.cases, *([] if takes_all else [[]]))
        elif isinstance(node, _TRIES):
            self._one_of([*node.body, *node.orelse], *(handler.body for handler in node.handlers))
            self._visit(node.finalbody)
        elif isinstance(node, _COMPREHENSIONS):
            kept = {*self.sure}, {*self.written}
            self._parts_of(node)
            self.sure, self.written = kept  # drop the comprehension's own names
        elif isinstance(node, ast.AST) and not isinstance(node, ast.Lambda) and getattr(node, "value", node) is not None:
            self._parts_of(node)

    def _parts_of(self, node: ast.AST) -> None:
        if isinstance(node, ast.AugAssign):
            self._read(_dotted(node.target))
        for part in _ORDER.get(type(node), node._fields):
            self._visit(getattr(node, part, None))
        if isinstance(node, ast.MatchAs | ast.MatchStar):
            self._write(node.name)
        elif isinstance(node, ast.MatchMapping):
            self._write(node.rest)
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            self._write(_dotted(node))
        else:
            self._read(_dotted(node))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _dotted(node.value.func).split(".")[-1] in _CLOCKS:
            self._clocks.update(map(_dotted, node.targets))
