"""Predict whether a script, after it leaves a body early, may read a name that bodies bind and that none has bound yet."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ftrun.worker.torch_compat.frames_private import has_own_locals, locals_of
from ftrun.worker.variables.loop_names import parsed, read_in_functions

_REGIONS = (ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)


def reads_unbound(frames: Iterable[FrameType], is_body: Callable[[Any], bool]) -> bool:
    """Tell whether the rest of the iteration or function after a body may read an unbound name; True if its source is missing.

    Args:
        frames: The script's frames, the innermost first.
        is_body: Is this object the step that the `with` has entered? If no `with` names it, each `with` that a frame is in may be the body.
    """
    places: list[tuple[bool, set[str] | None]] = []  # is it the body, and which names are missing; None: unknown
    for frame in frames:
        source = "".join(linecache.getlines(frame.f_code.co_filename))
        tree = parsed(source) if source else None
        if tree is None:
            places.append((False, None))
            continue
        bound = {**frame.f_globals, **(locals_of(frame) if has_own_locals(frame) else {})}
        for place in ast.walk(tree):
            if isinstance(place, ast.With | ast.AsyncWith) and place.lineno <= frame.f_lineno <= (place.end_lineno or 0):
                names = [item.context_expr.id for item in place.items if isinstance(item.context_expr, ast.Name)]
                places.append((any(is_body(bound.get(name)) for name in names), _needed(tree, place, frame) - bound.keys()))
    bodies = [missing for body, missing in places if body] or [missing for _, missing in places]
    return any(missing is None or missing for missing in bodies)


def _needed(tree: ast.Module, place: ast.With | ast.AsyncWith, frame: FrameType) -> set[str]:
    """Return names that the iteration or function around a `with` binds, and reads after it; in a module, also in called functions."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, _REGIONS) and node.lineno <= place.lineno <= (node.end_lineno or 0)]
    region = max(nodes, key=lambda node: node.lineno, default=tree)
    behind = [node for node in ast.walk(region) if getattr(node, "lineno", 0) > (place.end_lineno or 0)]
    behind += [*ast.walk(region.test)] if isinstance(region, ast.While) else []
    names = {node.id for node in behind if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if behind and not has_own_locals(frame):
        names |= {*read_in_functions(frame.f_code)}
    return names & {name for node in ast.walk(region) if (name := _bound_by(node)) is not None}


def _bound_by(node: ast.AST) -> str | None:
    """Return the name that an assignment, or a pattern of `match`, binds."""
    if isinstance(node, ast.Name):
        return node.id if isinstance(node.ctx, ast.Store) else None
    if isinstance(node, ast.MatchAs | ast.MatchStar):
        return node.name
    return node.rest if isinstance(node, ast.MatchMapping) else None
