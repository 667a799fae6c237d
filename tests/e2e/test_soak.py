"""Signals from outside, a dozen or more in one run, to ranks, spares and ftrun's own processes; it ends on stock torch's weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests import injected
from tests.e2e import growth, interrupts, soak, soaked, strikes
from tests.e2e.soaked import PROGRAMS

SEEDS = json.loads(soak.SEEDS.read_text())


def test_the_table_of_seeds_is_what_the_seeds_give() -> None:
    assert soak.rows([f"{row['program']}:{row['seed']}:{row['signals']}" for row in SEEDS]) == SEEDS
    assert {row["program"] for row in SEEDS} == set(PROGRAMS)
    assert not [kind for kind in strikes.KINDS if not sum(row[kind] for row in SEEDS)], "kinds that no seed has"


def test_a_kind_that_is_left_out_does_not_strike() -> None:
    struck = {strike.kind for strike in strikes.plan(1, 500, without="(server|store) freeze")}
    left_out = {"fork server freeze", "store freeze", "fd store freeze"}
    assert struck == set(strikes.KINDS) - left_out


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=f"{row['program']}-{row['seed']}") for row in SEEDS],
)
def test_signals(row: dict[str, int | str]) -> None:
    program, planned = PROGRAMS[str(row["program"])], strikes.plan(int(row["seed"]), int(row["signals"]))
    # a short name: in a long one the sockets of multiprocessing have no place in the run's folder
    with tempfile.TemporaryDirectory(prefix="s", ignore_cleanup_errors=True) as folder:
        reference = program.plain(Path(folder) / "plain")
        striker, found = strikes.run(Path(folder) / "run", program, planned, reference)
    assert not found, "\n".join([f"struck: {dict(striker.struck)}", *found[:8]])
    assert {kind: striker.struck[kind] for kind in strikes.KINDS} == {kind: row[kind] for kind in strikes.KINDS}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_wrong_end_is_found(tmp_path: Path) -> None:
    """Random streams are not put back, on purpose."""
    program = soaked.ddp(60)
    reference = program.plain(tmp_path / "plain")
    kills = strikes.plan(3, 4, without="^(?!rank kill)")
    striker, found = strikes.run(tmp_path / "run", program, kills, reference, injected.env(without="rng"))
    assert striker.struck == {"rank kill": 4}
    assert any("batches" in line or "rng" in line for line in found), found


def test_growth_is_what_became_more_after_the_first_count() -> None:
    assert growth.grown({10: {"fds": 5, "threads": 4}, 20: {"fds": 7, "threads": 4}}) == ["fds grew from 5 to 7"]
    assert (
        growth.grown({10: {"fds": 5, "threads": 4}, 20: {"fds": 7, "threads": 4}, 30: {"fds": 5, "threads": 4}}) == []
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_twenty_repairs_cost_nothing_for_good(tmp_path: Path) -> None:
    rows, found = growth.run(tmp_path, 20, seed=1, say=print)
    assert not found, "\n".join([*found, *growth.table(rows)])


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("interrupt", interrupts.plan(seed=1, number=4), ids=lambda interrupt: interrupt.moment)
def test_ctrl_c(tmp_path: Path, interrupt: interrupts.Interrupt) -> None:
    assert not interrupts.Interrupted(tmp_path, interrupt, start_up=3.0).run()
