"""Faults leave no trace: weights, optimizer state, buffers, random streams and batches equal an uninterrupted run's.

The uninterrupted run is stock torch, without torchrun's agent; the first test compares it with a real torchrun. Tests marked
slow run with `make chaos`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import injected
from tests.e2e import harness
from tests.e2e.conftest import Reference
from tests.e2e.harness import fault, kill

PHASES = ("forward", "backward", "gate", "update", "idle")
# a replacement is made after the stop
SECOND_DEATHS = [("survivor", "stop"), ("survivor", "restore"), ("replacement", "reset"), ("replacement", "restore")]

# name -> arguments of the reference script
CONFIGS: dict[str, list[str]] = {
    "adamw": [],
    "sgdm-inside-late": ["--optim", "sgdm", "--accum", "inside", "--order", "late"],
    "across": ["--accum", "across"],
    "loader": ["--data", "loader", "--workers", "2"],
    "late": ["--order", "late"],
    "sgdm": ["--optim", "sgdm"],
    "inside": ["--accum", "inside"],
    "sgdm-across": ["--optim", "sgdm", "--accum", "across"],
    "views": ["--bucket-views", "--fused"],
    "views-across": ["--bucket-views", "--fused", "--accum", "across"],
    "views-inside": ["--bucket-views", "--fused", "--accum", "inside", "--optim", "sgdm"],
    "loader-0": ["--data", "loader"],
    "loader-late-sgdm": ["--data", "loader", "--workers", "1", "--order", "late", "--optim", "sgdm"],
    "two-optims": ["--two-optims"],
    "scaler": ["--scaler"],
    "local-buffers": ["--local-buffers"],
    "everything": ["--two-optims", "--scaler", "--local-buffers", "--accum", "across", "--data", "loader"],
}
QUICK = ("sgdm-inside-late", "across", "loader")


def configs(*quick: str) -> list[object]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in CONFIGS]


def check(
    stock: Reference, folder: Path, config: str, faults: list[str], *, died: int, spares: int = 1
) -> harness.Outcome:
    """Run with faults, compare with torchrun, and prove that `died` workers really died by them."""
    arguments = CONFIGS[config]
    outcome = harness.ftrun(folder, arguments, faults, spares=spares)
    harness.same(stock(*arguments), outcome)
    assert len(outcome.notes("fault")) == died, outcome.tail()
    assert len(harness.deaths(outcome)) == died, outcome.tail()
    harness.check_survivors(outcome)
    return outcome


@pytest.mark.parametrize("config", configs())
def test_what_is_compared_with_is_what_torchrun_gives(stock: Reference, folder: Path, config: str) -> None:
    harness.same(stock(*CONFIGS[config]), harness.torchrun(folder, CONFIGS[config]))


@pytest.mark.parametrize("config", configs("adamw"))
def test_clean_run_equals_torchrun(stock: Reference, folder: Path, config: str) -> None:
    outcome = harness.ftrun(folder, CONFIGS[config])
    harness.same(stock(*CONFIGS[config]), outcome)
    assert all(result["buckets"] >= 3 for result in outcome.need())
    harness.check_survivors(outcome)
    assert harness.replaced_ranks(outcome) == set()
    assert re.search(r"ftrun: done: 12 steps in [\d.]+ s, all replicas equal after the last step, logs in ", outcome.output)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_ten_kills_in_one_run(stock: Reference, folder: Path, config: str) -> None:
    """Rank 0 and another rank, in every phase, one a step."""
    faults = [kill(rank, at, step) for step, (rank, at) in enumerate(((r, at) for at in PHASES for r in (0, 2)), 1)]
    check(stock, folder, config, faults, died=10)


def test_step_0_in_every_phase(stock: Reference, folder: Path) -> None:
    """One after the other: each death makes the ranks do step 0 again, until its update is done."""
    faults = [kill(rank, at, 0) for rank, at in zip((1, 2, 3, 0, 1), PHASES, strict=True)]
    check(stock, folder, "adamw", faults, died=5)


def test_buckets_lie_as_in_an_uninterrupted_run(stock: Reference, folder: Path) -> None:
    """On survivors and replacements, rank 0's too, and after a death in the step in which DDP lays them out anew."""
    faults = [kill(2, "backward", 1), kill(1, "backward", 2), kill(0, "backward", 5), kill(2, "update", 6)]
    outcome = check(stock, folder, "adamw", faults, died=4)
    layouts = {tuple(r["layout"]) for r in outcome.need()}
    assert layouts == {tuple(r["layout"]) for r in stock().need()} and len(layouts) == 1
    assert all(r["buckets"] >= 3 for r in outcome.need())


@pytest.mark.slow
@pytest.mark.parametrize("at", PHASES)
def test_step_0(stock: Reference, folder: Path, at: str) -> None:
    check(stock, folder, "adamw", [kill(1, at, 0)], died=1)


@pytest.mark.slow
def test_two_at_once(stock: Reference, folder: Path) -> None:
    check(stock, folder, "adamw", [kill(0, "backward", 4), kill(3, "backward", 4)], died=2)


@pytest.mark.parametrize(
    ("second", "at"),
    [("survivor", "reset"), *(pytest.param(*p, marks=pytest.mark.slow) for p in SECOND_DEATHS)],
)
def test_during_recovery(stock: Reference, folder: Path, second: str, at: str) -> None:
    """A second rank, or the replacement itself, dies while the world recovers from the first death."""
    rank = 2 if second == "survivor" else 1
    if second == "survivor" and at == "restore":
        # only a rank that is being replaced restores: two die, and then the second one's replacement again
        faults, died = [kill(1, "backward", 5), kill(2, "backward", 5), kill(2, "restore")], 3
    else:
        faults, died = [kill(1, "backward", 5), kill(rank, at)], 2
    check(stock, folder, "adamw", faults, died=died)


def test_adoption_keeps_private_parameters_in_the_same_memory(stock: Reference, folder: Path) -> None:
    """No replica has a rank-private parameter: only the dead rank's own memory does."""
    arguments = ["--private"]
    # not at the gate: when it opens all the same, the update is done elsewhere, and what only this rank had is lost
    faults = [kill(1, "forward", 3), kill(0, "backward", 5), kill(1, "backward", 8)]
    outcome = harness.ftrun(folder, arguments, faults)
    harness.same(stock(*arguments), outcome)
    for rank, kills in ((0, 1), (1, 2)):
        history = outcome.need()[rank]["history"]
        assert len({h["pid"] for h in history}) == kills + 1
        assert len({h["inode"] for h in history}) == 1 and history[0]["inode"] != 0
    assert "0 B moved" in outcome.output


def test_a_peer_gives_no_private_parameters(folder: Path) -> None:
    """After a death inside the update nobody has the rank's own values: none are taken from a peer."""
    outcome = harness.ftrun(folder, ["--private"], [kill(1, "update", 6)])
    assert outcome.code == 1, outcome.tail()
    assert "no other rank is known to hold the same values of module.private" in outcome.output


# what is left out -> configuration, faults in which it matters, and the first value that must differ
BREAKS = {
    "rng": ("adamw", [kill(1, "backward", 5)], "rank 0: batches: first at step 5"),
    "batch": ("loader-0", [kill(1, "backward", 5)], "rank 0: batches: first at step 5"),
    "slots": ("adamw", [kill(1, "update", 5)], "rank 1: batches"),
    "prime": ("adamw", [kill(1, "backward", 5)], "rank 0: losses"),
}


@pytest.mark.parametrize("part", [p if p == "prime" else pytest.param(p, marks=pytest.mark.slow) for p in BREAKS])
def test_negative_control(stock: Reference, folder: Path, part: str) -> None:
    """With one part of the recovery left out the run ends as if all were well, and the comparison finds what it is not."""
    config, faults, wanted = BREAKS[part]
    outcome = harness.ftrun(folder, CONFIGS[config], faults, env=injected.env(without=part), timeout=60)
    assert len(harness.deaths(outcome)) == 1
    found = harness.differences(stock(*CONFIGS[config]), outcome)  # needs exit code 0
    assert any(line.startswith(wanted) for line in found), found


def test_negative_control_of_the_commit_mark(folder: Path) -> None:
    """Without it torn weights are taken for whole ones, which the first comparison of replicas after the repair finds."""
    outcome = harness.ftrun(folder, [], [kill(1, "update", 5)], env=injected.env(without="seal"), timeout=60)
    assert outcome.code == 0, outcome.tail()
    assert "rank 1 became corrupt at the gate of step 6" in outcome.output, outcome.tail()
    assert "bit-identical to an uninterrupted run: no (seen at step 6: a rank's weights were corrupt" in outcome.output


def test_other_ends_of_a_worker(stock: Reference, folder: Path) -> None:
    ends = [("exit:3", "exit 3"), ("segv", "SIGSEGV"), ("abort", "SIGABRT"), ("term", "SIGTERM"), ("freeze", "froze")]
    faults = [fault(kind, 1 + number % 2, "backward", 2 + 2 * number) for number, (kind, _) in enumerate(ends)]
    outcome = harness.ftrun(folder, [], faults)
    harness.same(stock(), outcome)
    died = [a["detail"] for a in outcome.actions("Say") if a["what"] == "died"]
    assert len(died) == len(ends) and all(end in said for said, (_, end) in zip(died, ends, strict=True)), died
    assert harness.replaced_ranks(outcome) == {1, 2}
    harness.check_survivors(outcome)


@pytest.mark.slow
def test_exception_once_is_retried_in_place(stock: Reference, folder: Path) -> None:
    outcome = harness.ftrun(folder, [], [fault("exception", 2, "forward", 4)])
    harness.same(stock(), outcome)
    assert "injected fault: exception on rank 2" in outcome.output


@pytest.mark.slow
def test_exception_again_ends_the_run(folder: Path) -> None:
    outcome = harness.ftrun(folder, [], [fault("exception", 2, "forward", 4, times=2)])
    assert outcome.code == 1
    shown = outcome.output.index("injected fault: exception on rank 2 in forward of step 4")
    assert shown < outcome.output.index("in step 4 again after a retry; the run ends")
    assert "bit-identical" not in outcome.output
    assert harness.replaced_ranks(outcome) == set()


@pytest.mark.slow
def test_too_many_replacements_end_with_75(folder: Path) -> None:
    faults = [kill(1, "backward", step) for step in (2, 4)]
    outcome = harness.ftrun(folder, [], faults, options=["--max-replacements", "1"])
    assert outcome.code == 75
    assert "--max-replacements" in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("spares", [0, 2])
def test_other_numbers_of_spares(stock: Reference, folder: Path, spares: int) -> None:
    check(stock, folder, "adamw", [kill(2, "backward", 3), kill(0, "gate", 6)], died=2, spares=spares)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1, 2, 11])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("at", PHASES)
@pytest.mark.parametrize("config", ["adamw", "sgdm-inside-late", "across", "loader"])
def test_every_phase(stock: Reference, folder: Path, config: str, at: str, rank: int, step: int) -> None:
    check(stock, folder, config, [kill(rank, at, step)], died=1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 1), (1, 2), (0, 3)])
@pytest.mark.parametrize(
    "phases", [("forward", "forward"), ("gate", "backward"), ("update", "update"), ("update", "gate")]
)
def test_two_at_once_in_two_phases(
    stock: Reference, folder: Path, ranks: tuple[int, int], phases: tuple[str, str]
) -> None:
    check(stock, folder, "adamw", [kill(r, at, 6) for r, at in zip(ranks, phases, strict=True)], died=2, spares=2)


@pytest.mark.slow
@pytest.mark.parametrize("at", PHASES)
def test_consecutive_steps_of_one_rank(stock: Reference, folder: Path, at: str) -> None:
    check(stock, folder, "adamw", [kill(1, at, step) for step in (4, 5, 6)], died=3)
