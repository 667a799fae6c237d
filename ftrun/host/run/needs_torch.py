"""Guesses whether the program needs torch, whose import takes a second or two that a shell script or a tool can save.

Any sign of torch makes the answer yes. A wrong no costs only time: the worker then imports torch itself.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

_MOST = 1 << 20  # bytes; a longer script counts as one that needs torch
_INDIRECT = frozenset(("__import__", "exec", "eval", "compile"))
_IMPORTERS = frozenset(("importlib", "runpy", "pkgutil", "zipimport", "pickle", "code"))


def wants_torch(kind: str, argv: Sequence[str]) -> bool:
    """Is torch needed? False only for a program, or a script that imports only the standard library. `kind`, `argv`: as in Settings."""
    if kind == "program":
        return False
    if kind != "script":
        return True
    try:
        source = Path(argv[0]).read_bytes()
        if len(source) > _MOST or b"torch" in source:
            return True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's own process warns of escapes like "\\d"
            tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return True
    folder = Path(argv[0]).resolve().parent
    return any(_may_import_torch(node, folder) for node in ast.walk(tree))


def _may_import_torch(node: ast.AST, folder: Path) -> bool:
    match node:
        case ast.Import(names=names):
            return not all(_from_library(alias.name, folder) for alias in names)
        case ast.ImportFrom(module=str(name), level=0):
            return not _from_library(name, folder)
        case ast.ImportFrom():
            return True
        case ast.Name(id=name):
            return name in _INDIRECT
    return False


def _from_library(name: str, folder: Path) -> bool:
    top = name.partition(".")[0]
    own = (folder / f"{top}.py").exists() or (folder / top).is_dir()
    return top in sys.stdlib_module_names and top not in _IMPORTERS and not own
