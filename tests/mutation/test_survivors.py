"""The list of judged survivors names mutants that there are, and each mutant is another module than the right one."""

from __future__ import annotations

import ast

import pytest

from tests.mutation.mutants import modules, mutants, source
from tests.mutation.run import judged


def test_who_is_judged_is_a_mutant() -> None:
    assert judged() - {one.name for module in modules() for one in mutants(module)} == set()


@pytest.mark.parametrize("module", ["ftrun.control.blame", "ftrun.control.responses"])
def test_each_mutant_is_another_module(module: str) -> None:
    made = [one.tree() for one in mutants(module)]
    code = [ast.unparse(tree) for tree in made]
    assert ast.unparse(ast.parse(source(module))) not in code
    assert len(set(code)) == len(code), "and each another one"
    for tree in made:
        compile(tree, module, "exec")


def test_what_is_changed() -> None:
    names = {one.name for one in mutants("ftrun.control.budgets")}
    assert "budgets: `3` as `4` in `SPARE_FAILURES = 3`" in names
    assert "budgets.failure_key: without `return ''`" in names
    at = " in `if death.code is not None and 0 < death.code < 128:`"
    assert f"budgets.failure_key: `0 < death.code < 128` as `0 <= death.code < 128`{at}" in names
