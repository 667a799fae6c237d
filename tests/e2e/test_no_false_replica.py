"""Ranks of equal shapes that hold other values are never taken for replicas, whatever `protect(replicas=...)` says.

A run that is repaired ends on the bits of stock torch, or it ends with an exit code and says why.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import Outcome, fault, kill

SCRIPT = harness.SCRIPTS / "by_hand.py"
PART = 6  # in the update of this step experts part
VOID = "protect(replicas=...) is void: no rank gets the values of another one"
EVERY_2 = ("--snapshot-every", "2")


def uninterrupted(folder: Path, *arguments: str) -> list[dict[str, object]]:
    """What the same script gives on stock torch and Gloo."""
    command = [str(SCRIPT), "--backend", "gloo"]
    command += ["--out", str(folder / "stock" / "out"), *arguments]
    return harness.by_torch(folder / "stock", command, env={"PYTHONPATH": str(harness.ROOT)}).need()


def ours(folder: Path, arguments: tuple[str, ...], faults: list[str], options: tuple[str, ...] = ()) -> Outcome:
    given = ["--backend", "ftrun", "--out", str(folder / "ours" / "out"), *arguments]
    options = ("--max-replacements", "20", *options)
    command = harness.script_command(folder / "ours", SCRIPT, given, faults, options=options)
    return harness.finish(harness.start(folder / "ours", command))


def arguments_of(kind: str, declared: str) -> tuple[str, ...]:
    return ("--kind", kind, *(("--declared", *declared.split()) if declared else ()))


def copied(outcome: Outcome) -> int:
    return outcome.output.count("state copied from a peer")


@pytest.mark.slow
def test_tensor_parallelism_by_hand_with_its_twins_declared(folder: Path) -> None:
    """The slice comes from the rank that has the same one, and from no other."""
    arguments = arguments_of("tensor", "dp")
    faults = [kill(1, "forward", 2), kill(2, "update", 4), kill(3, "update", 6), kill(0, "backward", 8)]
    outcome = ours(folder, arguments, faults)
    assert outcome.need() == uninterrupted(folder, *arguments), outcome.tail()
    assert len(harness.deaths(outcome)) == len(faults) and copied(outcome) == 2, outcome.tail()
    assert "bit-identical to an uninterrupted run: yes" in outcome.output and VOID not in outcome.output


# where the word is wrong: kind, what is declared, and the step in whose update a rank dies
WRONG = {
    "slices, of a pair": ("tensor", "tp", 4),
    "slices, of all": ("tensor", "world", 4),
    "slices, in the first step": ("tensor", "tp", 0),
    "experts, while they part": ("experts", "dp", PART),
    "experts of all, while they part": ("experts", "world", PART),
    "experts, when they have parted": ("experts", "dp", PART + 2),
    "experts of all, when they have parted": ("experts", "world", PART + 2),
    "slices, undeclared": ("tensor", "", 4),
    "experts of one pair, while they part": ("experts", "dp --one", PART),
    "experts of one pair, when they have parted": ("experts", "dp --one", PART + 2),
    "experts, undeclared": ("experts", "", PART - 2),
    "experts, undeclared, when they have parted": ("experts", "", PART + 2),
}
QUICK = ("slices, of a pair", "experts of one pair, while they part", "experts of one pair, when they have parted")


def wrong(*quick: str) -> list[object]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in WRONG]


@pytest.mark.parametrize("name", wrong(*QUICK))
def test_a_death_in_the_update_ends_the_run(folder: Path, name: str) -> None:
    kind, declared, step = WRONG[name]
    outcome = ours(folder, arguments_of(kind, declared), [kill(2, "update", step)])
    assert outcome.code == 1 and "the state of rank 2 cannot be restored" in outcome.output, outcome.tail()
    assert "--snapshot-every" in outcome.output and outcome.ranks == [None] * harness.RANKS, outcome.tail()
    assert len(harness.deaths(outcome)) == 1 and not copied(outcome), outcome.tail()
    parting = kind == "experts" and step == PART  # only the gradients of that step tell
    assert (VOID in outcome.output) == bool(declared and not parting), outcome.tail()


@pytest.mark.parametrize("name", wrong("experts of one pair, while they part"))
def test_a_death_in_the_update_goes_back_to_the_snapshot(folder: Path, name: str) -> None:
    """Of which each rank loads its own part, also where all are said to hold the same."""
    kind, declared, step = WRONG[name]
    arguments = arguments_of(kind, declared)
    outcome = ours(folder, arguments, [kill(2, "update", step)], EVERY_2)
    assert outcome.need() == uninterrupted(folder, *arguments), outcome.tail()
    assert outcome.output.count("loaded from the host snapshot") == 1 and not copied(outcome), outcome.tail()


@pytest.mark.parametrize(
    ("kind", "declared"),
    [
        ("experts", "world"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("tensor", "world"), ("experts", "dp"))),
    ],
)
def test_a_wrong_word_costs_nothing_where_a_rank_adopts_its_own_memory(folder: Path, kind: str, declared: str) -> None:
    """But the run does not call itself exact: what it was told is not so. From then on gradients are sealed for a death at the gate."""
    arguments = arguments_of(kind, declared)
    faults = [kill(0, "forward", 1), kill(1, "backward", 4), kill(3, "backward", 8), kill(2, "gate", 10)]
    outcome = ours(folder, arguments, faults, ("--check-every", "1"))
    assert outcome.need() == uninterrupted(folder, *arguments), outcome.tail()
    assert VOID in outcome.output and not copied(outcome) and len(harness.deaths(outcome)) == len(faults), (
        outcome.tail()
    )
    assert re.search(r"uninterrupted run: no \(seen at step \d+: ranks that should hold the same differ", outcome.output), outcome.tail()
    assert not [event for event in outcome.events("Died") if event["fault"] == "corrupt"], outcome.tail()


@pytest.mark.slow
def test_one_expert_of_four_that_parts_is_not_outvoted(folder: Path) -> None:
    """Three equal ranks are no proof against the fourth: that they should be equal is only said."""
    faults = [fault("bitflip", 2, "idle", 3), kill(1, "update", 5)]
    outcome = ours(folder, arguments_of("experts", "world"), faults, EVERY_2)
    assert not [event for event in outcome.events("Died") if event["fault"] == "corrupt"], outcome.tail()
    assert VOID in outcome.output and not copied(outcome), outcome.tail()
    assert "bit-identical to an uninterrupted run: no (" in outcome.output, outcome.tail()
