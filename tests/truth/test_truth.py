"""No false "yes": each pattern clean, killed and under torchrun, and random scripts the same way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.truth import harness, random_scripts, table
from tests.truth.patterns import PATTERNS


def _cases() -> list[object]:
    return [pytest.param(n, marks=() if p.often else pytest.mark.slow) for n, p in PATTERNS.items()]


@pytest.mark.parametrize("name", _cases())
def test_pattern(name: str, tmp_path: Path) -> None:
    pattern = PATTERNS[name]
    runs = harness.three(tmp_path, pattern.source, pattern.faults)
    assert not runs.false_yes, runs.killed.output
    assert not runs.silent, f"a clean run ends elsewhere than torchrun's\n{runs.clean.output}"
    assert runs.killed.answer in pattern.answer.split(" or "), runs.killed.output
    if runs.killed.answer == "not known":
        assert runs.killed.names(pattern.named), f"{pattern.named} is not named\n{runs.killed.output}"
    if pattern.answer in ("refused", "error"):
        assert runs.clean.answer == pattern.answer, runs.clean.output
    else:
        assert runs.clean.code == runs.stock.code == 0, runs.clean.output + runs.stock.output
    if pattern.answer == "error":
        assert runs.stock.code == 1, runs.stock.output
    if pattern.answer == "yes":
        assert runs.killed.code == 0 and runs.killed.ranks == runs.stock.ranks, runs.killed.output


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 40))])
def test_random_script(seed: int, tmp_path: Path) -> None:
    """`python -m tests.truth.random_scripts --seed N` runs one again; `--count N` many."""
    source, faults = random_scripts.script(seed)
    runs = harness.three(tmp_path, source, faults)
    told = f"seed {seed}\n{source}\n{runs.killed.output}\n{runs.clean.output}"
    assert not runs.false_yes and not runs.silent, told
    assert runs.killed.answer != "not known" or runs.killed.reason, told


def test_each_pattern_that_may_be_not_known_says_what_is_to_be_named() -> None:
    unnamed = [name for name, p in PATTERNS.items() if "not known" in p.answer and not p.named]
    assert not unnamed, unnamed


def test_the_table_in_the_docs_is_that_of_the_patterns() -> None:
    assert table.PATH.read_text() == table.text(), "run: python -m tests.truth.table"
