"""A rank dies exactly between two board writes: each such place must be recovered from, for several ranks and steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import injected
from tests.e2e import harness
from tests.e2e.conftest import Reference
from tests.e2e.harness import kill

POINTS = [point for point in injected.inside.POINTS if point != "restored"]


@pytest.mark.slow
def test_deaths_between_two_writes_one_a_step(stock: Reference, folder: Path) -> None:
    places = [(point, step, 1 + step % 2) for step, point in enumerate(POINTS, 1)]
    pauses = ",".join(f"{point}:{step}:{rank}" for point, step, rank in places)
    outcome = harness.ftrun(folder, [], env=injected.env(pauses))
    harness.same(stock(), outcome)
    assert len(harness.deaths(outcome)) == len(POINTS), outcome.tail()
    assert harness.replaced_ranks(outcome) == {1, 2}
    harness.check_survivors(outcome)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "step"), [(1, 5), (0, 5), (3, 0)])
@pytest.mark.parametrize("point", POINTS)
def test_death_between_two_writes(stock: Reference, folder: Path, point: str, rank: int, step: int) -> None:
    outcome = harness.ftrun(folder, [], env=injected.env(f"{point}:{step}:{rank}"))
    harness.same(stock(), outcome)
    assert len(harness.deaths(outcome)) == 1, f"nobody died at {point}"
    assert harness.replaced_ranks(outcome) == {rank}
    harness.check_survivors(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["update", "backward"])
def test_replacement_dies_before_its_first_step(stock: Reference, folder: Path, at: str) -> None:
    """It has the weights, copied or adopted, and nothing in its slots for the step that it was to begin."""
    resume = 6 if at == "update" else 5
    fault = f'[[fault]]\nkind = "kill"\nrank = 2\nstep = 5\nat = "{at}"\n'
    outcome = harness.ftrun(folder, [], [fault], env=injected.env(f"restored:{resume}:2"))
    harness.same(stock(), outcome)
    assert len(outcome.events("Died")) >= 2, outcome.tail()
    harness.check_survivors(outcome)


@pytest.mark.parametrize("point", ["open", pytest.param("slot-end", marks=pytest.mark.slow)])
def test_rank_0_dies_before_it_published_the_bucket_order(stock: Reference, folder: Path, point: str) -> None:
    """The order of gradients was seen in step 0 only; the ranks agree on it, and a later replacement still finds it."""
    outcome = harness.ftrun(folder, [], [kill(2, "backward", 4)], env=injected.env(f"{point}:0:0"))
    harness.same(stock(), outcome)
    assert harness.replaced_ranks(outcome) == {0, 2}
    assert "bit-identical to an uninterrupted run: yes" in outcome.output
    harness.check_survivors(outcome)
