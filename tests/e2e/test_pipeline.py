"""Pipelines of torch.distributed.pipelining, with and without data parallelism: repaired in place, and never with another stage's
weights, though all stages have the same shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import injected
from tests.e2e import harness, layouts
from tests.e2e.harness import Outcome, kill

SCRIPT = harness.SCRIPTS / "pipelined.py"
CALLS = 18  # sends, receives and reductions of a rank in a step, with two stages on four ranks
SEVERAL = 52  # the same with two stages on each rank


def torchrun(folder: Path, *arguments: str) -> list[dict[str, object]]:
    """What the same script gives with gloo."""
    stock = [str(SCRIPT)]
    stock += ["--backend", "gloo", "--out", str(folder / "stock" / "out"), *arguments]
    return harness.by_torch(folder / "stock", stock).need()


def ours(
    folder: Path,
    *arguments: str,
    faults: list[str] | None = None,
    options: tuple[str, ...] = (),
    spares: int = 1,
    env: dict[str, str] | None = None,
    timeout: float = harness.TIMEOUT,
) -> Outcome:
    """The same under ftrun. Steps are told as `--die` and in plans; a rank dies in the first try only."""
    ours = folder / "ours"
    command = harness.script_command(
        ours,
        SCRIPT,
        ["--backend", "ftrun", "--out", str(ours / "out"), *arguments],
        faults or [],
        spares=spares,
        options=("--max-replacements", "300", *options),
    )
    return harness.finish(harness.start(ours, command, env), timeout=timeout)


def die(rank: int, step: int, call: int, when: str) -> list[str]:
    return ["--die", f"{rank}:{step}:{call}:{when}"]


def test_deaths_in_every_phase_and_around_calls_change_nothing(folder: Path) -> None:
    """1F1B, two stages, each on two ranks under DDP. One death in a step, but both ranks of a stage die in the ninth."""
    arguments = ["--schedule", "1f1b", "--steps", "14"]
    deaths = [*die(0, 0, 4, "after"), *die(2, 7, 3, "before"), *die(1, 8, 9, "after"), *die(3, 10, 18, "before")]
    faults = [kill(0, "forward", 1), kill(2, "backward", 2), kill(1, "gate", 3), kill(3, "gate", 4)]
    faults += [kill(0, "update", 5), kill(2, "update", 6), kill(2, "backward", 9), kill(3, "backward", 9)]
    wanted = torchrun(folder, *arguments)
    outcome = ours(folder, *arguments, *deaths, faults=faults, spares=2)
    layouts.keep(SCRIPT.name, [*arguments, *deaths], outcome, wanted)
    assert outcome.need() == wanted, outcome.tail()
    assert len(harness.deaths(outcome)) == len(deaths) // 2 + len(faults), outcome.tail()
    # in the update the weights are torn: they come from the rank that has the same stage
    assert outcome.output.count("state copied from a peer") >= 2, outcome.tail()
    assert "bit-identical to an uninterrupted run: yes" in outcome.output


def test_without_a_replica_a_stage_is_adopted_or_all_go_back(folder: Path) -> None:
    """Four equal-shaped stages whose shapes torch finds out by a trial, which must not be repeated: buffers count it."""
    arguments = ["--dp", "1", "--replicas", "--given"]
    faults = [kill(0, "backward", 0), kill(1, "backward", 2), kill(3, "forward", 4), kill(2, "update", 7)]
    wanted = torchrun(folder, *arguments)
    outcome = ours(folder, *arguments, faults=faults, options=("--snapshot-every", "3"))
    layouts.keep(SCRIPT.name, arguments, outcome, wanted)
    assert outcome.need() == wanted, outcome.tail()
    sources = [{s["name"] for s in i["sources"].values()} - {""} for i in outcome.notes("incident")]
    assert sources == [{"adopt"}, {"adopt"}, {"adopt"}, {"snapshot"}], outcome.tail()


def test_a_stage_without_replica_that_dies_in_its_update_is_lost_and_the_message_helps(folder: Path) -> None:
    outcome = ours(folder, "--dp", "1", faults=[kill(2, "update", 4)])
    layouts.keep(SCRIPT.name, ["--dp", "1"], outcome, None)
    assert outcome.code == 75, outcome.tail()
    assert "the state of rank 2 cannot be restored" in outcome.output
    assert "--snapshot-every" in outcome.output


@pytest.mark.slow
def test_without_the_reset_a_pipeline_does_not_come_back(folder: Path) -> None:
    """The control: what the first try left in the schedule is noticed."""
    arguments = ["--steps", "6"]
    broken, options = injected.env(without="pipeline"), ("--hang-timeout", "5")
    outcome = ours(folder, *arguments, faults=[kill(2, "backward", 3)], env=broken, options=options)
    assert "rank 2 died in backward of step 3" in outcome.output and "takes over rank 2" in outcome.output, outcome.tail()
    assert outcome.code != 0 or outcome.need() != torchrun(folder, *arguments), outcome.tail()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("arguments", "calls", "every"),
    [
        (["--schedule", "gpipe"], CALLS, 1),
        (["--schedule", "1f1b", "--replicas"], CALLS, 1),
        (["--schedule", "interleaved"], SEVERAL, 3),
    ],
    ids=["gpipe", "1f1b by hand", "interleaved"],
)
def test_a_death_before_and_after_every_call(folder: Path, arguments: list[str], calls: int, every: int) -> None:
    places = [
        (rank, call, when)
        for call in range(1, calls + 1, every)
        for when in ("before", "after")
        for rank in (call % 4, (call + 2) % 4)
    ]
    deaths = [word for step, (rank, call, when) in enumerate(places, 1) for word in die(rank, step, call, when)]
    steps = ["--steps", str(len(places) + 2)]
    wanted = torchrun(folder, *arguments, *steps)
    outcome = ours(folder, *arguments, *steps, *deaths, timeout=600)
    layouts.keep(SCRIPT.name, [*arguments, *deaths], outcome, wanted)
    assert outcome.need() == wanted, outcome.tail()
    assert len(harness.deaths(outcome)) == len(places), outcome.tail()
