"""Will the program need torch? Importing it takes a second or two, which a shell script or a tool need not wait for.

A guess in one direction only: when anything speaks for torch the answer is yes, and a wrong no costs time, nothing else:
the worker then imports torch by itself.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

_MOST = 1 << 20  # bytes of a script that is looked at
_INDIRECT = frozenset(("__import__", "exec", "eval", "compile"))
_IMPORTERS = frozenset(("importlib", "runpy", "pkgutil", "zipimport", "pickle", "code"))


def wants_torch(kind: str, argv: Sequence[str]) -> bool:
    """`kind` and `argv` as in Settings. False only for a program, or a script that imports nothing but the library."""
    if kind == "program":
        return False
    if kind != "script":
        return True
    try:
        source = Path(argv[0]).read_bytes()
        if len(source) > _MOST or b"torch" in source:
            return True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's own process warns of an escape like "\\d"
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
