"""Every kind of fault in every phase, 4 ranks: found as what it is, the right rank blamed, repaired, and equal in the end.

`make matrix` does all of it and writes the results and the table of docs/reference/faults.md; `make test` does a sample.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftrun.faults.kinds import KINDS
from tests.e2e import harness, matrix
from tests.e2e.conftest import Reference
from tests.e2e.matrix import Batch, Cell

KEEP = "FTRUN_MATRIX"  # set by `make matrix`: write what happened into matrix.json

SAMPLE = (
    Batch("exit", (Cell("exit", "gate", 1, 2), Cell("exit", "update", 2, 5))),
    Batch("freeze", (Cell("freeze", "restore", 2, 4, 1),)),
)


def check(stock: Reference, folder: Path, batch: Batch) -> None:
    """A plan names two steps for a fault in a repair. Where a rank was slow, both strike, one after the other: that is another story."""
    for number in range(3):
        own = folder / str(number)
        own.mkdir()
        outcome = matrix.run(own, batch)
        harness.check_no_strays(own)
        if not matrix.struck_twice(batch, outcome):
            break
    ends = all(matrix.BY_KIND[c.kind].expect(c.phase)[1] == matrix.ENDED for c in batch.cells)
    results = matrix.judge(batch, outcome, None if ends else stock(*matrix.BY_KIND[batch.kind].arguments))
    if os.environ.get(KEEP):
        matrix.save(results)
    wrong = [f"{r.kind} in {r.phase}: {r.wrong}" for r in results if r.wrong]
    assert not wrong, "\n".join([*wrong, outcome.tail()])


@pytest.mark.parametrize("batch", SAMPLE, ids=lambda batch: batch.name)
def test_sample(stock: Reference, folder: Path, batch: Batch) -> None:
    check(stock, folder, batch)


@pytest.mark.slow
@pytest.mark.parametrize("batch", matrix.batches(), ids=lambda batch: batch.name)
def test_matrix(stock: Reference, folder: Path, batch: Batch) -> None:
    check(stock, folder, batch)


def test_every_kind_has_its_row() -> None:
    assert set(matrix.BY_KIND) == set(KINDS)
    run = {(cell.kind, cell.phase) for batch in matrix.batches() for cell in batch.cells}
    assert run == {(kind.name, phase) for kind in KINDS.values() for phase in kind.phases}


def test_the_table_in_the_docs_is_what_the_runs_left() -> None:
    text = matrix.PAGE.read_text()
    assert matrix.with_table(text) == text, "run: make matrix (or python -m tests.e2e.matrix)"
    results = matrix.load()
    assert [r for r in results if r["wrong"]] == []
    run = {(cell.kind, cell.phase) for batch in matrix.batches() for cell in batch.cells}
    assert {(r["kind"], r["phase"]) for r in results} == run


def test_a_wrong_outcome_is_noticed(stock: Reference, folder: Path) -> None:
    """The judge is no rubber stamp: another kind's run does not pass, nor one that ended on other weights."""
    batch = Batch("exit", (Cell("exit", "forward", 1, 2),))
    plan = [harness.fault("kill", 1, "forward", 2)]
    outcome = harness.ftrun(folder, matrix.ARGUMENTS, plan)
    clean = stock(*matrix.ARGUMENTS)
    assert matrix.judge(batch, outcome, clean)[0].wrong == "did not fire"
    for note in outcome.notes("fault"):
        note["fired"]["kind"] = "exit"
    assert "found as" in matrix.judge(batch, outcome, clean)[0].wrong
    assert matrix.judge(Batch("kill", (Cell("kill", "forward", 1, 2),)), outcome, clean)[0].wrong
