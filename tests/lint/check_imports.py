"""Checks the direction of every import in ftrun/, that files import each other in no circle, who may import torch, and that
no two classes have one name.

Run by `make lint`; exit 1 with a list, and a line of figures.

It reads the syntax tree and imports nothing. An import counts wherever it stands, also inside a function or a block for
type checkers: only the exceptions named here are free of that.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_CODE = frozenset({".py", ".pyi", ".cpp", ".hpp", ".h", ".cu", ".ptx", ".supp"})  # suffixes of what `figures` counts

# Layer -> the layers that it may import. "" is the package's own __init__.py.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "": frozenset({"core"}),
    "__main__": frozenset({"cli"}),
    "cli": frozenset({"view", "doctor", "verify", "host", "control", "faults", "core", "native"}),
    "view": frozenset({"control", "faults", "core", "native"}),
    "doctor": frozenset({"host", "core", "native"}),
    "verify": frozenset({"host", "faults", "core"}),
    "helpers": frozenset({"host", "core", "native"}),
    "host": frozenset({"control", "faults", "core", "native"}),
    "control": frozenset({"faults", "core"}),
    "integrations": frozenset({"", "worker", "core"}),
    "worker": frozenset({"faults", "core", "native"}),
    "faults": frozenset({"core", "native"}),
    "core": frozenset({"native"}),
    "native": frozenset(),
}

# Imports against the arrows that are right, but only inside a function or for type checkers: (module, imported prefix).
LATE_ONLY = (
    ("ftrun", "ftrun.worker"),  # the public names of the worker, loaded when a script first uses one
    ("ftrun.helpers.fork_server", "ftrun.worker.process.main"),  # in the forked child
    ("ftrun.helpers.fork_server", "ftrun.worker.process.preloaded"),  # where it does not only start interpreters
    ("ftrun.native", "ftrun.core.errors"),  # when the library is missing
)

# The rooms of a package, lowest first: a room imports only rooms to its left. What stands in no room is not held to an order.
ROOMS: dict[str, tuple[str, ...]] = {
    "host": ("base", "rundir", "output", "services", "workers", "detect", "devices", "nodes", "account", "run"),
    "host.nodes": ("messages", "carriers", "membership", "node_group"),
    "worker": ("torch_compat", "link", "memory", "variables", "state", "comm", "repair", "step", "process"),
}

# Rooms with a wall: from outside only their doors are imported.
WALLED = tuple(f"ftrun.worker.{room}" for room in ROOMS["worker"])

# Public classes of ftrun.integrations, which have the names that their users know from the frameworks.
OF_FRAMEWORKS = frozenset({"Trainer"})

TORCH = frozenset({"torch", "torchvision", "torchaudio"})
# Modules outside ftrun.worker and ftrun.integrations that run in the fork server's process or in a fork of it.
TORCH_ALLOWED = frozenset({"ftrun.helpers.fork_server", "ftrun.helpers.store"})

# The control layer decides from its arguments alone: no clock, no I/O, no chance.
IMPURE = frozenset(
    {"asyncio", "datetime", "io", "multiprocessing", "os", "pathlib", "random", "secrets", "select", "selectors"}
    | {"shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time"}
)
# The journal's replay can be run by hand on a file.
IMPURE_ALLOWED = frozenset({("ftrun.control.replay", "pathlib")})


class Found(NamedTuple):
    """One import: the full name, its line, and whether it happens later than the import of the module."""

    name: str
    line: int
    late: bool


def layer_of(module: str) -> str:
    """The layer of a module of the package: `ftrun.host.base.loop` -> `host`, `ftrun` -> ``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports_of(tree: ast.Module, module: str, is_package: bool) -> Iterator[Found]:
    """Every import in the tree, relative ones resolved. `from a import b` counts as `a.b`."""
    package = module.split(".") if is_package else module.split(".")[:-1]

    def visit(node: ast.AST, late: bool) -> Iterator[Found]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Found(alias.name, node.lineno, late)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module or "") if part)
            for alias in node.names:
                yield Found(f"{source}.{alias.name}", node.lineno, late)
        elif isinstance(node, ast.Call) and _callee(node) in ("import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield Found(node.args[0].value, node.lineno, late)
        inside_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, late or inside_function or for_types)

    yield from visit(tree, False)


def _callee(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def complaints(module: str, source: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of one module, as `module:line: why`."""
    layer = layer_of(module)
    if layer not in MAY_IMPORT:
        return [f"{module}:1: layer {layer!r} is not in MAY_IMPORT"]
    wrong = []
    for found in imports_of(ast.parse(source), module, is_package):
        why = _why_not(module, layer, found)
        if why:
            wrong.append(f"{module}:{found.line}: {why}")
    return wrong


def _why_not(module: str, layer: str, found: Found) -> str:
    top = found.name.split(".")[0]
    if top in TORCH and layer not in ("worker", "integrations") and module not in TORCH_ALLOWED:
        return f"imports {found.name}; only ftrun.worker, ftrun.integrations and {', '.join(sorted(TORCH_ALLOWED))} may"
    if layer == "control" and top in IMPURE and (module, top) not in IMPURE_ALLOWED:
        return f"imports {found.name}; ftrun.control is pure"
    if top != "ftrun" or found.name == "ftrun":
        return ""
    against = against_order(module, found.name)
    if against:
        return against
    target = layer_of(found.name)
    if target not in MAY_IMPORT:
        return ""  # a name of ftrun/__init__.py, not a layer
    if target == layer or target in MAY_IMPORT[layer]:
        return ""
    for importer, prefix in LATE_ONLY:
        if module == importer and f"{found.name}.".startswith(f"{prefix}."):
            return "" if found.late else f"imports {found.name} at module level; only inside a function"
    allowed = ", ".join(sorted(MAY_IMPORT[layer])) or "none"
    return f"imports {found.name}; {layer or 'ftrun/__init__.py'} may import {allowed}"


def against_order(module: str, imported: str) -> str:
    """Why the order of the rooms forbids this import; "" when it does not."""
    for package, rooms in ROOMS.items():
        prefix = f"ftrun.{package}."
        if not (module.startswith(prefix) and imported.startswith(prefix)):
            continue
        here, there = (name.removeprefix(prefix).split(".")[0] for name in (module, imported))
        if here in rooms and there in rooms and rooms.index(there) > rooms.index(here):
            return f"imports {imported}; in ftrun/{package.replace('.', '/')}, {here} lies below {there}"
    return ""


def doors(docstring: str | None) -> list[str]:
    """Files of a room that may be imported from outside: those that the docstring of its `__init__` lists under "Doors:"."""
    _, _, listed = (docstring or "").partition("\nDoors:\n")
    return re.findall(r"^    (\w+): \S", listed, re.M)


def walls(sources: dict[str, tuple[str, bool]], rooms: Iterable[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Imports of a room's insides from outside, and doors that nobody uses; and each room's doors."""
    open_ = {room: doors(ast.get_docstring(ast.parse(sources[room][0]), clean=True)) for room in rooms}
    used: dict[str, set[str]] = {room: set() for room in open_}
    wrong = []
    for module, targets in graph(sources).items():
        for room in open_:
            if module != room and not module.startswith(f"{room}."):
                within = {target.removeprefix(f"{room}.") for target in targets if target.startswith(f"{room}.")}
                used[room] |= within
                wrong += [f"{module}:1: imports {room}.{name}, which is no door of that room" for name in within - {*open_[room]}]
    wrong += [f"{room}:1: nobody outside imports its door {name}" for room in open_ for name in {*open_[room]} - used[room]]
    return sorted(wrong), open_


def circles(modules: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others. `modules`: name -> what it imports."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for name in modules[todo.pop()] - seen:
                seen.add(name)
                todo.append(name)
        return seen

    reach = {name: reached(name) for name in modules}
    groups = {
        frozenset(other for other in seen if name in reach[other]) for name, seen in reach.items() if name in seen
    }
    return sorted(sorted(group) for group in groups)


def graph(sources: dict[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """Module -> modules of ftrun that it imports anywhere, late or for types as well. The public `ftrun` itself is left out."""
    found: dict[str, set[str]] = {}
    for module, (source, is_package) in sources.items():
        names = {imported.name for imported in imports_of(ast.parse(source), module, is_package)}
        # `from a.b import c` is about the module a.b.c, or else about a name in a.b
        targets = {name if name in sources else name.rpartition(".")[0] for name in names}
        found[module] = {target for target in targets if target in sources and target != module}
    found.pop("ftrun", None)
    return {module: targets - {"ftrun"} for module, targets in found.items()}


def same_names(sources: dict[str, tuple[str, bool]]) -> list[str]:
    """Classes whose name another class of the package has: a person who reads one cannot tell which is meant."""
    places: dict[str, list[str]] = {}
    for module, (source, _) in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and node.name not in OF_FRAMEWORKS:
                places.setdefault(node.name, []).append(f"{module}:{node.lineno}")
    return [f"{at[0]}: another class is called {name}: {', '.join(at[1:])}" for name, at in places.items() if at[1:]]


def read(root: Path) -> dict[str, tuple[str, bool]]:
    """Every module of the package under `root`: its source, and whether it is a package."""
    modules = {}
    for path in sorted((root / "ftrun").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        modules[".".join(parts[:-1] if is_package else parts)] = path.read_text(), is_package
    return modules


def check(root: Path) -> list[str]:
    """Complaints about every module of the package under `root`."""
    modules = read(root)
    wrong = []
    for module, (source, is_package) in modules.items():
        wrong += complaints(module, source, is_package)
    wrong += same_names(modules)
    wrong += walls(modules, WALLED)[0]
    wrong += [f"{circle[0]}:1: imports itself through {', '.join(circle[1:])}" for circle in circles(graph(modules))]
    return wrong


def figures(root: Path) -> str:
    """The size and the order of the code, in one line."""
    code = [
        path
        for folder in ("ftrun", "native")
        for path in (root / folder).rglob("*")
        if path.suffix in _CODE or path.name == "CMakeLists.txt"
    ]
    lines = sum(len(path.read_text().splitlines()) for path in code)
    modules = read(root)
    against = {
        module
        for module, (source, is_package) in modules.items()
        for found in imports_of(ast.parse(source), module, is_package)
        if against_order(module, found.name)
    }
    in_circles = [len(circle) for circle in circles(graph(modules))]
    shut = walls(modules, WALLED)
    sizes = Counter(module.rpartition(".")[0] for module in modules)
    counts = ", ".join(f"{room.rpartition('.')[2]} {len(names)} of {sizes[room]}" for room, names in shut[1].items())
    folders = Counter(path.parent for path in code)
    largest, most = folders.most_common(1)[0]
    return (
        f"{len(code)} files, {lines} lines; circles: {len(in_circles)}{f' (of {in_circles} files)' if in_circles else ''}; "
        f"files against the order of rooms: {len(against)}; largest folder: {largest.relative_to(root)} with {most} files\n"
        f"doors of the rooms of the worker: {counts}; imports of insides: {len(shut[0])}"
    )


def main() -> int:
    wrong = check(ROOT)
    for line in wrong:
        print(line, file=sys.stderr)
    print(figures(ROOT))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
