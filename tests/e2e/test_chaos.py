"""Thirty kills from outside in one run, spares and ftrun's own processes among the victims; it ends on stock torch's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e import chaos
from tests.e2e.conftest import Reference

SEEDS = json.loads(chaos.SEEDS.read_text())


def test_the_seed_table_is_what_the_seeds_give() -> None:
    assert [row for row in SEEDS if row != {"seed": row["seed"], "kills": 30, **chaos.victims(row["seed"])}] == []
    assert all(row[victim] for row in SEEDS for victim in chaos.VICTIMS), "a run that spares somebody"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.slow if n else (), id=str(row["seed"])) for n, row in enumerate(SEEDS)]
)
def test_thirty_kills(stock: Reference, folder: Path, row: dict[str, int]) -> None:
    killer, found = chaos.run(folder, chaos.plan(row["seed"]), stock(*chaos.ARGUMENTS))
    assert not found, "\n".join([f"seed {row['seed']}, killed {dict(killer.killed)}", *found[:8]])
    assert {victim: killer.killed[victim] for victim in chaos.VICTIMS} == {v: row[v] for v in chaos.VICTIMS}
