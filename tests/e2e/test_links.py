"""Connections that cannot be made in a repair, though nobody died: all are made again, then the rank gets a new worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ftrun.core.shared.board import F
from tests.e2e import harness
from tests.e2e.conftest import Reference
from tests.e2e.harness import fault, kill
from tests.e2e.test_services import Live, until

BAD_LINK = harness.SCRIPTS / "bad_link.py"


def with_bad_link(folder: Path, rank: int, times: int, when: str) -> list[str]:
    """The command of a run in which rank 1 is killed, and `rank` cannot connect after that."""
    command = harness.ftrun_command(folder, [], [kill(1, "backward", 5)])
    at = command.index(str(harness.REFERENCE))
    return [*command[:at], str(BAD_LINK), str(rank), str(times), when, *command[at:]]


def run(folder: Path, rank: int, times: int, when: str) -> harness.Outcome:
    return harness.finish(harness.start(folder, with_bad_link(folder, rank, times, when)))


@pytest.mark.parametrize(
    ("rank", "when"),
    [
        pytest.param(2, "after", marks=pytest.mark.slow),
        (3, "before"),
        pytest.param(1, "after", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_cannot_connect_gets_new_connections(stock: Reference, folder: Path, rank: int, when: str) -> None:
    outcome = run(folder, rank, 1, when)
    harness.same(stock(), outcome)
    harness.check_survivors(outcome)
    (event,) = outcome.events("Unconnected")
    assert event["fault"] == "link" and event["worker"] == (4 if rank == 1 else rank)
    assert len(harness.deaths(outcome)) == 1, "nobody else is replaced"
    assert f"rank {rank} could not be connected with the others (RuntimeError: Gloo connectFullMesh" in outcome.output
    assert outcome.output.count("spare 4 takes over rank 1; step 5 again; state adopted in place") == 1
    assert "1 incident, 1 step done again" in outcome.output
    (incident,) = outcome.notes("incident")
    assert list(incident["sources"]) == ["1"] and [v["rank"] for v in incident["victims"]] == [1]


def test_connections_that_fail_again_cost_the_rank_its_worker(stock: Reference, folder: Path) -> None:
    outcome = run(folder, 2, 2, "before")
    harness.same(stock(), outcome)
    assert harness.replaced_ranks(outcome) == {1, 2}
    assert "rank 2 died" in outcome.output and "could not be connected with the other ranks again" in outcome.output
    for rank in (1, 2):
        assert outcome.output.count(f" takes over rank {rank};") == 1


def test_connections_cut_in_a_repair_are_missed_in_a_replacements_first_step(stock: Reference, folder: Path) -> None:
    faults = [kill(1, "backward", 5), fault("comm", 3, "restore")]
    outcome = harness.ftrun(folder, [], faults)
    harness.same(stock(), outcome)
    harness.check_survivors(outcome)
    (cut,) = [n["fired"] for n in outcome.notes("fault") if n["fired"]["kind"] == "comm"]
    found = outcome.events("Stuck") + outcome.events("Unconnected")
    assert found and found[0]["fault"] == "link"
    assert found[0]["t"] - cut["t"] < 15, "a first step that computes has a minute"


def test_a_launcher_that_was_stopped_learns_of_a_death_and_of_its_consequence_at_once(
    stock: Reference, folder: Path
) -> None:
    live = Live(folder, with_bad_link(folder, 2, 1, "after"))
    live.ended_or(lambda: live.world().generation == 2, "the second world")
    os.kill(live.launcher, signal.SIGSTOP)
    try:
        until(lambda: live.cells()[2][F.UNCONNECTED] == 2, "the report")
        live.kill("ftrun rank 3")
    finally:
        os.kill(live.launcher, signal.SIGCONT)
    outcome = live.finish()
    harness.same(stock(), outcome)
    assert harness.replaced_ranks(outcome) == {1, 3}


@pytest.mark.slow
def test_connections_that_fail_for_ever_end_the_run(folder: Path) -> None:
    outcome = run(folder, 2, 99, "before")
    assert outcome.code == 75, outcome.tail()
    assert "rank 2 died too often" in outcome.output and "--max-replacements" in outcome.output
    assert "ftrun replaced rank 2 3 times, then gave up" in outcome.output
