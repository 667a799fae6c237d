"""Connections that cannot be made in a repair, though nobody died: all are made again, then the rank gets a new worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ftrun.core.board import F
from tests.e2e import harness
from tests.e2e.conftest import Reference
from tests.e2e.harness import kill
from tests.e2e.test_services import Live, until

BAD_LINK = harness.SCRIPTS / "bad_link.py"


def with_bad_link(folder: Path, rank: int, times: int, when: str) -> list[str]:
    """The command of a run in which rank 1 is killed, and `rank` cannot connect after that."""
    command = harness.ftrun_command(folder, [], [kill(1, "backward", 5)])
    at = command.index(str(harness.REFERENCE))
    return [*command[:at], str(BAD_LINK), str(rank), str(times), when, *command[at:]]


def run(folder: Path, rank: int, times: int, when: str) -> harness.Outcome:
    return harness.finish(harness.start(folder, with_bad_link(folder, rank, times, when)))


@pytest.mark.parametrize(("rank", "when"), [(2, "after"), (3, "before"), (1, "after")])
def test_a_rank_that_cannot_connect_gets_new_connections(
    stock: Reference, folder: Path, rank: int, when: str
) -> None:
    outcome = run(folder, rank, 1, when)
    harness.same(stock(), outcome)
    harness.check_survivors(outcome)
    (raised,) = outcome.events("Raised")
    assert raised["fault"] == "link" and raised["worker"] == (4 if rank == 1 else rank)
    assert len(harness.deaths(outcome)) == 1, "nobody else is replaced"
    assert f"rank {rank} lost its connections to the others (RuntimeError: Gloo connectFullMesh" in outcome.output
    assert "making all connections again" in outcome.output
    assert outcome.output.count("rank 1 is now spare 4; step 5 again; state adopted in place") == 1
    (incident,) = outcome.notes("incident")
    assert list(incident["sources"]) == ["1"] and incident["total_ms"] < 20_000


def test_a_launcher_that_was_stopped_learns_of_a_death_and_of_its_consequence_at_once(
    stock: Reference, folder: Path
) -> None:
    live = Live(folder, with_bad_link(folder, 2, 1, "after"))
    live.ended_or(lambda: live.world().generation == 2, "the second world")
    os.kill(live.launcher, signal.SIGSTOP)
    try:
        until(lambda: live.cells()[2][F.RAISED] == 2, "the report")
        live.kill("ftrun rank 3")
    finally:
        os.kill(live.launcher, signal.SIGCONT)
    outcome = live.finish()
    harness.same(stock(), outcome)
    assert harness.replaced_ranks(outcome) == {1, 3}


@pytest.mark.slow
def test_connections_that_fail_again_cost_the_rank_its_worker(stock: Reference, folder: Path) -> None:
    outcome = run(folder, 2, 2, "before")
    harness.same(stock(), outcome)
    assert harness.replaced_ranks(outcome) == {1, 2}


@pytest.mark.slow
def test_connections_that_fail_for_a_new_worker_too_end_the_run(folder: Path) -> None:
    outcome = run(folder, 2, 99, "before")
    assert outcome.code == 1
    assert "also after all connections were made again; the run ends" in outcome.output
