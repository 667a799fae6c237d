"""Which names of a script's loop carry a value from one iteration to the next: read from its source, nothing is run.

A name that an iteration reads before it writes it, and writes somewhere, is carried: a counter, a running mean, a batch that
was fetched ahead. A replacement does not have its value, and a step done again finds the value of the first try.
"""

from __future__ import annotations

import ast
import functools
import linecache
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ftrun.worker.torch_compat.frames_private import has_own_locals, locals_of

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_CLOCKS = ("time", "perf_counter", "monotonic", "time_ns", "perf_counter_ns", "monotonic_ns")
_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))  # from Python 3.11 on
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.Lambda, ast.ClassDef)


@dataclass(frozen=True)
class LoopNames:
    """`carried`: read before they are written. `fresh`: written in iterations, and `always` in each, before they are read.

    `outside`: written in each iteration of a loop around.
    """

    carried: frozenset[str]
    fresh: frozenset[str]
    outside: frozenset[str]
    always: frozenset[str] = frozenset()


def loop_names(source: str, line: int) -> LoopNames | None:
    """The names of the innermost loop that holds `line`; None when there is no such loop, or the source is no Python."""
    around = _loops(source, line)
    if not around:
        return None
    walk = _walked(around[-1])
    outside = {name for loop in around[:-1] for name in _stores(loop)} - walk.stored_anywhere
    fresh, always = walk.stored_anywhere - walk.carried, walk.stored - walk.early
    return LoopNames(frozenset(walk.carried), frozenset(fresh), frozenset(outside), frozenset(always))


def _loops(source: str, line: int) -> list[ast.For | ast.AsyncFor | ast.While]:
    """Those that hold `line`, the outermost first."""
    tree = parsed(source)
    if tree is None:
        return []
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _LOOPS) and _holds(node, line)
    ]
    return sorted(around, key=lambda node: node.lineno)


def _walked(loop: ast.For | ast.AsyncFor | ast.While) -> _Walk:
    walk = _Walk()
    if isinstance(loop, ast.While):
        walk.visit(loop.test)
    else:
        walk.store(loop.target)
    walk.body(loop.body)
    return walk


def carried(frame: FrameType) -> frozenset[str]:
    """Names that the loops which a frame is in carry from one iteration to the next."""
    return _carried("".join(linecache.getlines(frame.f_code.co_filename)), frame.f_lineno)


@functools.lru_cache(64)  # a function with a loop is called in each epoch
def _carried(source: str, line: int) -> frozenset[str]:
    return frozenset(name for loop in _loops(source, line) for name in _walked(loop).carried)


@functools.lru_cache(maxsize=4)
def parsed(source: str) -> ast.Module | None:
    """None when it is no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python has warned of an escape like "\\d" already, by the name of the file
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError):
            return None


def made_anew(frame: FrameType) -> frozenset[str]:
    """Names that the loop which a frame is in writes in each iteration before anybody reads them."""
    source = "".join(linecache.getlines(frame.f_code.co_filename))
    names = loop_names(source, frame.f_lineno)
    if names is None:
        return frozenset()
    if has_own_locals(frame):
        return names.always
    return names.always - read_in_functions(source)  # one that the loop calls may read a name before the loop writes it


def reads_unbound_behind(frames: Sequence[FrameType], is_body: Callable[[Any], bool]) -> bool:
    """May what the script does behind the body that it is in read a name that a body binds, and none has bound yet?

    Behind it is the rest of an iteration, or of a function. Where the body's source cannot be read nobody knows: True.

    Args:
        frames: Those of the script, the innermost first.
        is_body: Is that what `with` has entered? Where no `with` names it, each one that a frame is in may be the body.
    """
    places: list[tuple[bool, set[str] | None]] = []  # is it the body, and what is missing, None: nobody knows
    for frame in frames:
        source = "".join(linecache.getlines(frame.f_code.co_filename))
        tree = parsed(source) if source else None
        if tree is None:
            places.append((False, None))
            continue
        bound = {**frame.f_globals, **(locals_of(frame) if has_own_locals(frame) else {})}
        for place in ast.walk(tree):
            if isinstance(place, ast.With | ast.AsyncWith) and _holds(place, frame.f_lineno):
                names = [item.context_expr.id for item in place.items if isinstance(item.context_expr, ast.Name)]
                missing = _read_behind(tree, place, "" if has_own_locals(frame) else source) - bound.keys()
                places.append((any(is_body(bound.get(name)) for name in names), missing))
    bodies = [missing for body, missing in places if body] or [missing for _, missing in places]
    return any(missing is None or missing for missing in bodies)


def _read_behind(tree: ast.Module, place: ast.With | ast.AsyncWith, functions: str) -> set[str]:
    """Names that the iteration or function around a `with` binds, and reads behind it, or calls one of the `functions` that do."""
    around = [node for node in ast.walk(tree) if isinstance(node, (*_LOOPS, *_FUNCTIONS)) and _holds(node, place.lineno)]
    region = max(around, key=lambda node: node.lineno, default=tree)
    behind = [node for node in ast.walk(region) if getattr(node, "lineno", 0) > (place.end_lineno or place.lineno)]
    behind += [*ast.walk(region.test)] if isinstance(region, ast.While) else []
    names = {node.id for node in behind if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if behind and functions:
        names |= read_in_functions(functions)
    return names & _stores(region)


def _holds(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def read_in_functions(source: str) -> frozenset[str]:
    """Names that a function, a method or a lambda of this source reads."""
    tree = parsed(source)
    if tree is None:
        return frozenset()
    found: set[str] = set()
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            nodes = list(ast.walk(function))
            names = [node for node in nodes if isinstance(node, ast.Name)]
            of_the_module = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
            own = {node.id for node in names if isinstance(node.ctx, ast.Store)} - of_the_module
            own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
            found |= {node.id for node in names if isinstance(node.ctx, ast.Load)} - own
    return frozenset(found)


def _stores(loop: ast.AST) -> set[str]:
    return {name for node in ast.walk(loop) if (name := _written(node))}


def _written(node: ast.AST) -> str:
    if isinstance(node, ast.MatchAs | ast.MatchStar):
        return node.name or ""
    if isinstance(node, ast.MatchMapping):
        return node.rest or ""
    return _dotted(node) if isinstance(getattr(node, "ctx", None), ast.Store) else ""


def _takes_all(case: ast.match_case) -> bool:
    return case.guard is None and isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None


def _dotted(node: ast.AST) -> str:
    """`x` or `self.x`; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return ""


class _Walk:
    """One iteration, in the order in which Python evaluates it."""

    def __init__(self) -> None:
        self.stored: set[str] = set()  # for sure, so far
        self.stored_anywhere: set[str] = set()
        self.early: set[str] = set()  # read when they were not stored for sure
        self.clocks: set[str] = set()  # hold a time of day: no state of a training

    @property
    def carried(self) -> set[str]:
        return (self.early & self.stored_anywhere) - self.clocks

    def body(self, statements: Iterable[ast.AST]) -> None:
        for statement in statements:
            self.visit(statement)

    def store(self, target: ast.AST) -> None:
        for node in ast.walk(target):
            name = _written(node)
            if name:
                self.stored.add(name)
                self.stored_anywhere.add(name)
            elif isinstance(node, ast.Name):
                self.load(node.id)

    def load(self, name: str) -> None:
        if name not in self.stored:
            self.early.add(name)

    def branches(self, *each: Sequence[ast.AST]) -> None:
        """Ways of which one is taken: stored for sure is what all of them store."""
        before, ends = set(self.stored), []
        for statements in each:
            self.stored = set(before)
            self.body(statements)
            ends.append(self.stored)
        self.stored = set.intersection(*ends)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, _SCOPES):
            if not isinstance(node, ast.Lambda):  # the name is bound anew; what it closes over has names of its own
                self.stored.add(node.name)
                self.stored_anywhere.add(node.name)
            return
        if isinstance(node, ast.AugAssign):
            self.visit(node.value)
            name = _dotted(node.target)
            if name:
                self.load(name)
            self.store(node.target)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            if node.value is not None:
                self.visit(node.value)
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self.store(target)
                    if isinstance(node.value, ast.Call) and _dotted(node.value.func).split(".")[-1] in _CLOCKS:
                        self.clocks.add(_dotted(target))
        elif isinstance(node, ast.NamedExpr):
            self.visit(node.value)
            self.store(node.target)
        elif isinstance(node, ast.If):
            self.visit(node.test)
            self.branches(node.body, node.orelse)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self.visit(node.iter)
            self.store(node.target)
            self.body([*node.body, *node.orelse])  # seldom does nothing come
        elif isinstance(node, ast.While):
            self.visit(node.test)
            self.body([*node.body, *node.orelse])
        elif isinstance(node, ast.Match):
            self.visit(node.subject)
            self.branches(*([case] for case in node.cases), *([] if _takes_all(node.cases[-1]) else [[]]))
        elif isinstance(node, ast.match_case):
            self.store(node.pattern)
            self.body([part for part in (node.guard, *node.body) if part is not None])
        elif isinstance(node, _TRIES):
            self.branches([*node.body, *node.orelse], *(handler.body for handler in node.handlers))
            self.body(node.finalbody)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self.visit(item.context_expr)
                if item.optional_vars is not None:
                    self.store(item.optional_vars)
            self.body(node.body)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            self._comprehension(node)
        elif isinstance(node, ast.Attribute) and _dotted(node):
            self.load(_dotted(node))
            self.visit(node.value)
        elif isinstance(node, ast.Name):
            self.load(node.id)
        else:
            for child in ast.iter_child_nodes(node):
                self.visit(child)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        """Its own names are stored before they are read."""
        kept = set(self.stored)
        for part in node.generators:
            self.visit(part.iter)
            self.stored |= {n.id for n in ast.walk(part.target) if isinstance(n, ast.Name)}
            for test in part.ifs:
                self.visit(test)
        for value in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(value)
        self.stored = kept
