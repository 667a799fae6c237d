"""Small wrong versions of a module: each has one comparison, constant, operator or statement changed. Reads source, runs nothing."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "ftrun" / "control"
PLAN = "ftrun.worker.repair.plan"

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_REMOVED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.Raise, ast.Delete, ast.Continue)
_UNTOUCHED = (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)  # narrowing for the type checker, and words
_LONGEST = 110  # characters of a piece of code in a name
_SHORT = 25  # characters: below, the statement around it is told as well


@dataclass(frozen=True)
class Mutant:
    """`function`: the outermost one that is changed, "" = code that runs when the module is imported. `tree`: the wrong module."""

    name: str
    module: str
    function: str
    line: int
    end: int
    tree: Callable[[], ast.Module]


def modules() -> list[str]:
    """Names of all modules of the controller, and that of the plan of a repair."""
    files = sorted(path.relative_to(ROOT) for path in FOLDER.rglob("*.py") if path.stat().st_size)
    return [*(".".join(path.with_suffix("").parts) for path in files), PLAN]


def short(module: str) -> str:
    """The name of a module as people read it."""
    return module.removeprefix("ftrun.control.").removeprefix("ftrun.worker.repair.")


def source(module: str) -> str:
    return (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")


def mutants(module: str) -> list[Mutant]:
    """In the order of the source. Names are those of the place and what is changed there, and stay when lines move."""
    text = source(module)
    seen: Counter[str] = Counter()
    found = []
    for index, (node, around, function) in enumerate(_places(ast.parse(text))):
        for at, change in enumerate(_changes(node) if function or isinstance(node, ast.expr) else []):
            before, after = _first_line(node), _first_line(change())
            name = f"{short(module)}{function and f'.{function}'}: "
            name += f"without `{before}`" if after == "pass" else f"`{before}` as `{after}`"
            name += f" in `{_first_line(around)}`" if len(before) < _SHORT and around is not node else ""
            seen[name] += 1
            name += f" ({seen[name]})" if seen[name] > 1 else ""
            found.append(Mutant(name, module, function, node.lineno, node.end_lineno or node.lineno, _Maker(text, index, at)))
    return found


@dataclass(frozen=True)
class _Maker:
    text: str
    index: int
    at: int

    def __call__(self) -> ast.Module:
        tree = ast.parse(self.text)
        node = [node for node, *_ in _places(tree)][self.index]
        new = _changes(node)[self.at]()
        for parent in ast.walk(tree):
            for field, value in ast.iter_fields(parent):
                if value is node:
                    setattr(parent, field, new)
                elif isinstance(value, list) and node in value:
                    value[value.index(node)] = new
        return ast.fix_missing_locations(tree)


def _places(tree: ast.Module) -> list[tuple[ast.expr | ast.stmt, ast.AST, str]]:
    """Every expression and statement that may be changed, with the statement and the outermost function around it."""

    def visit(node: ast.AST, statement: ast.AST, function: str, classes: str) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST, str]]:
        if isinstance(node, _UNTOUCHED):
            return
        statement = node if isinstance(node, ast.stmt) else statement
        if isinstance(node, (ast.expr, ast.stmt)):
            yield node, statement, function
        for field, value in ast.iter_fields(node):
            inside, around = function, classes
            if field in ("annotation", "returns", "decorator_list"):
                continue
            if isinstance(node, ast.ClassDef):
                around = f"{classes}{node.name}."
            elif isinstance(node, (ast.FunctionDef, ast.Lambda)) and field == "body":
                inside = function or (f"{classes}{node.name}" if isinstance(node, ast.FunctionDef) else "")
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_words(child):
                    yield from visit(child, statement, inside, around)

    return list(visit(tree, tree, "", ""))


def _is_words(node: ast.AST) -> bool:
    """A docstring, or another string that stands alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _changes(node: ast.expr | ast.stmt) -> list[Callable[[], ast.expr | ast.stmt]]:
    if isinstance(node, _REMOVED):
        return [ast.Pass]
    if isinstance(node, (ast.If, ast.IfExp)) and not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
        test = ast.UnaryOp(ast.Not(), node.test)  # what is compared is changed itself
        return [lambda: type(node)(test, node.body, node.orelse)]
    if isinstance(node, ast.Compare):
        return [_compare(node, at) for at, op in enumerate(node.ops) if type(op) in _COMPARISONS]
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return [lambda: ast.BoolOp(other, node.values)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [lambda: node.operand]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return [lambda: ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        return [lambda: ast.Call(ast.Name(_CALLS[node.func.id], ast.Load()), node.args, node.keywords)]  # type: ignore[attr-defined]
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        value = node.value
        return [lambda: ast.Constant(not value if isinstance(value, bool) else value + 1)]
    return []


def _compare(node: ast.Compare, at: int) -> Callable[[], ast.expr]:
    return lambda: ast.Compare(
        node.left, [_COMPARISONS[type(op)]() if i == at else op for i, op in enumerate(node.ops)], node.comparators
    )


def _first_line(node: ast.AST) -> str:
    text = ast.unparse(ast.fix_missing_locations(node)).split("\n")[0]
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
