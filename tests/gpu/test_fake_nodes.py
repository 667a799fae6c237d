"""Nodes whose GPUs are fake: what is on them comes from another node, read by the worker that uses it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.e2e import harness, over_nodes
from tests.e2e.harness import Running, fault, kill
from tests.gpu.conftest import RANKS, SCRIPT, Outcome, named, run, same
from tests.native import fake

STEPS = ("--steps", "40")
SLOWLY = ("--pause", "0.05", "--still")
LATE = 24  # a step that comes after the spare node
OPTIONS = ("--rdzv-conf", "keep_alive=2")


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The uninterrupted result, on one node."""
    folder = tmp_path_factory.mktemp("long")
    return run(folder / "run", fake.Control(folder / "cuda.txt"), *STEPS)


@pytest.fixture
def here(folder: Path, control: fake.Control, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a run whose processes find the fake driver."""
    for name, value in control.env.items():
        monkeypatch.setenv(name, value)
    (folder / "out").mkdir(parents=True)
    return folder


def begin(folder: Path, faults: Sequence[str], further: Sequence[str] = SLOWLY) -> list[Running]:
    """Start two nodes of two ranks and a spare one, and wait until that one waits."""
    begun = over_nodes.begin(folder, (*STEPS, *further), faults, script=SCRIPT, options=OPTIONS, spares=[2])
    wait_for(lambda: "this node is a spare" in begun[2].output, "a spare node")
    return begun


def end(begun: list[Running], lost: int) -> list[Outcome]:
    """Wait for the end of all nodes but the lost one; each outcome has what all ranks wrote."""
    begun[lost].wait(60.0)
    left = [one for node, one in enumerate(begun) if node != lost]
    codes = [one.wait(60.0) for one in left]
    out = left[0].folder.parent / "out"
    ranks = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(RANKS) if (out / f"rank-{rank}.json").exists()]
    for one in left:
        harness.check_journal(one.folder)
    return [Outcome(code, ranks, harness.read_journal(one.folder), one.output) for code, one in zip(codes, left, strict=True)]


@pytest.mark.parametrize(
    ("phase", "rank", "resume"),
    [
        ("backward", 0, LATE),
        pytest.param("gate", 2, LATE, marks=pytest.mark.slow),
        pytest.param("update", 0, LATE + 1, marks=pytest.mark.slow),
    ],
)
def test_a_spare_node_gets_what_is_on_the_gpus_of_another_node(phase: str, rank: int, resume: int, here: Path, long: Outcome) -> None:
    """Rank 0 gives its buffers to all others, so a wrong one would be in every result."""
    outcomes = end(begin(here, [fault("node-kill", rank, phase, LATE)]), rank // 2)
    for outcome in outcomes:
        same(long, outcome)
    text = outcomes[1].output
    assert f"step {resume}; state copied from another node" in text and over_nodes.EXACT in text, text[-4000:]


@pytest.mark.slow
def test_buffers_that_the_update_wrote_are_named(here: Path, long: Outcome) -> None:
    outcomes = end(begin(here, [fault("node-kill", 2, "backward", LATE)], SLOWLY[:2]), 1)
    for outcome in outcomes:
        same(long, outcome)
    assert "not known (since step 24: buffers that the update wrote" in outcomes[1].output, outcomes[1].output[-4000:]


@pytest.mark.slow
def test_the_rank_that_has_it_dies_beside_the_node(here: Path, long: Outcome) -> None:
    """Its replacement adopts its memory and reads it for the other node; or the rank beside it does."""
    outcomes = end(begin(here, [fault("node-kill", 2, "backward", LATE), kill(0, "backward", LATE), kill(1, "backward", LATE)]), 1)
    for outcome in outcomes:
        same(long, outcome)
        assert over_nodes.EXACT in outcome.output, outcome.output[-4000:]


@pytest.mark.slow
def test_a_new_fd_store_is_told_who_reads(here: Path, long: Outcome) -> None:
    begun = begin(here, [fault("node-kill", 2, "backward", LATE)])
    (store,) = named(begun[0].folder, "ftrun fd store")
    os.kill(store, signal.SIGKILL)
    wait_for(lambda: named(begun[0].folder, "ftrun fd store") not in ([], [store]), "another fd store")
    outcomes = end(begun, 1)
    for outcome in outcomes:
        same(long, outcome)
    assert over_nodes.EXACT in outcomes[1].output, outcomes[1].output[-4000:]
