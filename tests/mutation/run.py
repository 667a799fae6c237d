"""Do the tests of the controller and of the plan of a repair see each small mistake?

Runs them on every mutant, and compares the survivors with `survivors.md`.

`python -m tests.mutation.run [--module NAME] [--every N]`: exit code 1 for a survivor that nobody judged, or a judged one that
does not survive any more, 2 where the tests fail without any mutant. The tests run once, in this process, which remembers which lines
each of them touches; then each mutant gets a fork of it, in which one function has other code, and the tests that touch it run until
one fails. What is done when a module is imported (tables, constants) is changed in forks of a process that has imported nothing of the
controller yet.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis  # noqa: F401  # before the forks, which would else import it each
import pytest
from _pytest.runner import runtestprotocol

from tests.mutation.mutants import FOLDER, PLAN, ROOT, Mutant, modules, mutants, short

SURVIVORS = ROOT / "tests" / "mutation" / "survivors.md"
TESTS = [
    *(str(path) for path in sorted((ROOT / "tests" / "unit").glob("test_machine*.py")) if "properties" not in path.name),
    *(f"{ROOT}/tests/unit/test_{name}.py" for name in ("blame", "hangs", "limits", "policy", "replay", "stalls", "stragglers", "symptoms")),
]
TESTS_OF_PLAN = [f"{ROOT}/tests/worker/repair/test_plan.py"]
OPTIONS = ["-q", "-x", "--capture=sys", "-o", "timeout=0", "-m", "not slow"]
OPTIONS += ["-p", "no:cacheprovider", "-p", "no:warnings", "-p", "no:xdist"]
PATIENCE = 60  # seconds for the tests of one mutant; one that turns in circles does not survive


def judged() -> set[str]:
    """Names of the mutants that survive rightly, as `survivors.md` lists them."""
    return set(re.findall(r"^- (.+)$", SURVIVORS.read_text(encoding="utf-8"), re.MULTILINE))


class Forks:
    """A plugin of pytest that runs the collected tests once, and then again on each mutant of a function."""

    def __init__(self, wanted: Sequence[Mutant]) -> None:
        self._wanted = wanted
        self.survivors: list[Mutant] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        touched: dict[tuple[str, int], list[pytest.Item]] = {}
        spent: dict[str, float] = {}
        for item in session.items:
            since = time.monotonic()
            with _tracing() as lines:
                if not _passes(item):
                    raise pytest.UsageError(f"{item.nodeid} fails without any mutant")
            spent[item.nodeid] = time.monotonic() - since
            for line in lines:
                touched.setdefault(line, []).append(item)
        for mutant in self._wanted:
            path = _file(mutant.module)
            items = {i.nodeid: i for line in range(mutant.line, mutant.end + 1) for i in touched.get((path, line), ())}
            ordered = sorted(items.values(), key=lambda item: spent[item.nodeid])
            if _survives(mutant, functools.partial(_tests_pass, mutant, ordered)):
                self.survivors.append(mutant)
        return True


def _tests_pass(mutant: Mutant, items: Sequence[pytest.Item]) -> bool:
    """In the fork: give the function its wrong code, and run the tests."""
    live = _function(mutant)
    code = compile(mutant.tree(), live.__code__.co_filename, "exec", dont_inherit=True)
    live.__code__ = _code_of(code, mutant.function.split("."))
    return all(map(_passes, items))


def _passes(item: pytest.Item) -> bool:
    return all(report.passed or report.skipped for report in runtestprotocol(item, log=False, nextitem=None))


def _function(mutant: Mutant) -> Any:
    found: Any = sys.modules[mutant.module]
    for name in mutant.function.split("."):
        found = vars(found)[name]
    found = found.fget if isinstance(found, property) else found
    return getattr(found, "__func__", found)


def _code_of(code: types.CodeType, names: Sequence[str]) -> types.CodeType:
    for name in names:
        code = next(one for one in code.co_consts if isinstance(one, types.CodeType) and one.co_name == name)
    return code


@contextlib.contextmanager
def _tracing() -> Iterator[set[tuple[str, int]]]:
    """Files and lines of the controller and of the plan that are run meanwhile."""
    found: set[tuple[str, int]] = set()
    wanted = f"{FOLDER}{os.sep}", _file(PLAN)

    def lines(frame: types.FrameType, event: str, argument: Any) -> Any:
        found.add((frame.f_code.co_filename, frame.f_lineno))
        return lines

    def calls(frame: types.FrameType, event: str, argument: Any) -> Any:
        return lines(frame, event, argument) if frame.f_code.co_filename.startswith(wanted) else None

    sys.settrace(calls)
    try:
        yield found
    finally:
        sys.settrace(None)


class Wrong(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the module of one mutant as that has it."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def exec_module(self, module: types.ModuleType) -> None:
        code = compile(self._mutant.tree(), self._mutant.module, "exec", dont_inherit=True)
        types.FunctionType(code, module.__dict__)()


def _imported_wrong(mutant: Mutant) -> bool:
    sys.meta_path.insert(0, Wrong(mutant))
    return _all_pass([mutant])


def _all_pass(wanted: Sequence[Mutant], *plugins: object) -> bool:
    """Do the tests of these mutants' modules pass?"""
    of_plan = {one.module == PLAN for one in wanted}
    tests = [*(TESTS if False in of_plan else ()), *(TESTS_OF_PLAN if True in of_plan else ())]
    return pytest.main([*OPTIONS, *tests], plugins=[*plugins]) == 0


def _file(module: str) -> str:
    return str(ROOT / (module.replace(".", "/") + ".py"))


def _survives(mutant: Mutant, passes: Callable[[], bool]) -> bool:
    """Do all tests pass on it? A survivor is told at once."""
    survives = _in_fork(passes)
    if survives:
        print(mutant.name, file=sys.__stdout__, flush=True)
    return survives


def _in_fork(passes: Callable[[], bool], patience: int = PATIENCE) -> bool:
    pid = os.fork()
    if pid == 0:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(patience)
        code = 1
        try:
            code = 0 if passes() else 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--module", choices=[short(name) for name in modules()])
    parser.add_argument("--every", type=int, default=1, help="only each N-th mutant")
    parser.add_argument("--functions", action="store_true", help="leave out what runs when a module is imported, which takes the longest")
    arguments = parser.parse_args()
    wanted = [one for name in modules() if arguments.module in (None, short(name)) for one in mutants(name)]
    wanted = [one for one in wanted if one.function or not arguments.functions][:: arguments.every]
    since = time.monotonic()
    found = importlib.util.find_spec("ftrun")
    if found is None or not (found.origin or "").startswith(f"{ROOT}{os.sep}"):
        print(f"the tests import another ftrun than that of {ROOT}: they would see no mutant", file=sys.stderr)
        return 2
    fail = "the tests fail without any mutant: they can tell nothing"
    if not _in_fork(functools.partial(_all_pass, wanted), patience=0):
        print(fail, file=sys.stderr)
        return 2
    survivors = [one for one in wanted if not one.function and _survives(one, functools.partial(_imported_wrong, one))]
    forks = Forks([one for one in wanted if one.function])
    if not _all_pass(wanted, forks):
        print(fail, file=sys.stderr)
        return 2
    survivors += forks.survivors
    known, left = judged(), {one.name for one in survivors}
    new, gone = sorted(left - known), sorted(known & {one.name for one in wanted} - left)
    for name in new:
        print(f"survives, and nobody judged it: {name}")
    for name in gone:
        print(f"does not survive any more: {name}")
    print(f"{len(wanted)} mutants in {time.monotonic() - since:.0f} s; {len(left)} survive, {len(left) - len(new)} of them judged")
    return 1 if new or gone else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as _FOLDER:  # what the tests of a fork leave, which is never cleaned up
        tempfile.tempdir = _FOLDER
        status = main()
    sys.exit(status)
