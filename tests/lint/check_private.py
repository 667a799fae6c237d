"""Checks that private names of other people's code are used in five files of ftrun/worker/torch_compat alone. Run by `make lint`.

It reads the syntax trees and imports nothing. A name with a leading underscore is taken for somebody else's unless ftrun
defines it; the names that those files declare are refused elsewhere whatever ftrun defines.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = "ftrun/worker/torch_compat/torch_private.py"
HOMES = (HOME, *(f"ftrun/worker/torch_compat/{kind}_private.py" for kind in ("sharded", "pipeline", "loader", "frames")))

# Underscored names that their owners document for everybody.
PUBLIC = frozenset(
    {"_replace", "_asdict", "_fields", "_make"}  # of named tuples
    | {"_fields_", "_as_parameter_"}  # of ctypes
    | {"_exit"}  # os._exit
)
# Private all the same: (file, what), with the reason.
ALLOWED = frozenset(
    {
        ("ftrun/helpers/fork_server.py", "torch._dynamo"),  # a module that optimizers import: it is only imported ahead
    }
)
# Names without an underscore that are no public interface.
HIDDEN = frozenset({"pythonapi"})

_OURS = re.compile(r"_ftrun\w*$")  # what ftrun leaves on other people's objects
_PRIVATE = re.compile(r"_[A-Za-z0-9]\w*$|_$")
_BY_NAME = frozenset({"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller"})
_IMPORTING = frozenset({"import_module", "__import__"})
_OWN = frozenset({"self", "cls"})


def is_private(name: str) -> bool:
    """Does the name say that it is its owner's alone? Names such as `__len__` are protocols of the language."""
    return bool(_PRIVATE.match(name)) and not name.endswith("__") and name not in PUBLIC and not _OURS.match(name)


def defined(tree: ast.Module) -> Iterator[str]:
    """Names that can follow a dot because this module defines them: of modules and classes, and what is set in `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                yield from _bound(statement)
                if isinstance(node, ast.ClassDef) and isinstance(statement, ast.Assign):  # __slots__
                    yield from (
                        c.value
                        for c in ast.walk(statement.value)
                        if isinstance(c, ast.Constant) and isinstance(c.value, str)
                    )


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def declared(tree: ast.Module) -> set[str]:
    """The private names in the entries of one of the files: strings in calls of `Private`, and keys of the table there."""
    found: set[str] = set()
    for node in ast.walk(tree):
        strings = [c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
        if (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Private") or isinstance(node, ast.Dict):
            found |= {s for s in strings if is_private(s)}
    return found


def needed(tree: ast.Module) -> set[str]:
    """The private names of a framework that a module of ftrun/integrations lists in its `_NEEDED`."""
    tables = [n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "_NEEDED"]
    return {c.value for t in tables for c in ast.walk(t) if isinstance(c, ast.Constant) and isinstance(c.value, str)}


def complaints(file: str, source: str, ours: frozenset[str], theirs: frozenset[str] = frozenset()) -> list[str]:
    """What is wrong in one file, as `file:line: why`. `ours`: names that ftrun defines; `theirs`: declared ones."""
    if file in HOMES:
        return []
    wrong = []
    tree = ast.parse(source)
    listed = needed(tree) if file.startswith("ftrun/integrations/") else set()
    for line, what in _used(tree):
        if what.rpartition(".")[2] in listed or (file, what) in ALLOWED or _is_ours(file, what, ours, theirs):
            continue
        wrong.append(f"{file}:{line}: {what} is not public; use it through {HOME}, which says why")
    return wrong


def _is_ours(file: str, what: str, ours: frozenset[str], theirs: frozenset[str]) -> bool:
    # only a worker has objects of torch's in its hands, whose names may be the same
    return what in ours and not (what in theirs and file.startswith("ftrun/worker/"))


def _used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every private name that may be another's, an attribute by itself and a module with its dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            changes_class = node.attr == "__class__" and isinstance(node.ctx, ast.Store)
            if (is_private(node.attr) and not _is_own(node.value)) or node.attr in HIDDEN or changes_class:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module != "__future__":
            parts = (node.module or "").split(".")
            names = [node.module or ""] if any(map(is_private, parts)) else []
            if parts[0] != "ftrun":
                names += [f"{node.module}.{alias.name}" for alias in node.names if is_private(alias.name)]
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if any(map(is_private, a.name.split("."))))
        elif isinstance(node, ast.Call) and _callee(node) in _BY_NAME:
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield from ((node.lineno, p) for p in argument.value.split(".") if is_private(p))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"torch(\.\w+)+", node.value)
        ):
            if any(map(is_private, node.value.split("."))):  # a module to be imported by its name
                yield node.lineno, node.value


def _is_own(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return getattr(value.func, "id", "") == "super"
    return isinstance(value, ast.Name) and value.id in _OWN


def _callee(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def check(root: Path) -> list[str]:
    """Complaints about every file of the package under `root`."""
    sources = {str(path.relative_to(root)): path.read_text() for path in sorted((root / "ftrun").rglob("*.py"))}
    trees = {file: ast.parse(source) for file, source in sources.items()}
    ours = frozenset(name for file, tree in trees.items() if file not in HOMES for name in defined(tree))
    theirs = frozenset(name for home in HOMES for name in declared(trees[home]))
    return [line for file, source in sources.items() for line in complaints(file, source, ours, theirs)]


def main() -> int:
    wrong = check(ROOT)
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"private names of others outside {HOME}: {len(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
