"""Kills in a model of 10.6 M parameters, against torchrun itself: what changes the arithmetic must not change the result."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import kill

LARGE = ["--width", "1880", "--steps", "8"]
FAULTS = [kill(1, "backward", 3), kill(0, "update", 5), kill(2, "gate", 6), kill(3, "forward", 6)]
# name -> arguments, environment, ranks
CASES: dict[str, tuple[list[str], dict[str, str], int]] = {
    "plain": ([], {}, 4),
    "clipping": (["--clip", "0.5"], {}, 4),
    "autocast": (["--autocast"], {}, 4),
    "inductor": (["--compile"], {}, 4),
    "two-threads": ([], {"OMP_NUM_THREADS": "2"}, 4),
    "eight-ranks": ([], {}, 8),
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_kills_in_a_large_model(folder: Path, case: str) -> None:
    arguments, env, ranks = CASES[case]
    expected = harness.torchrun(folder / "torchrun", LARGE + arguments, ranks, env)
    outcome = harness.ftrun(folder / "ftrun", LARGE + arguments, FAULTS, ranks=ranks, env=env, timeout=180)
    harness.same(expected, outcome)
    assert len(harness.deaths(outcome)) == len(FAULTS), outcome.tail()
    harness.check_survivors(outcome)
    for run in ("torchrun", "ftrun"):
        harness.check_no_strays(folder / run)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["clipping", "autocast"])
def test_what_is_added_changes_the_result(folder: Path, case: str) -> None:
    """Else the cases above would not test it."""
    arguments, _, _ = CASES[case]
    plain, other = (harness.torchrun(folder / str(n), [*LARGE, *more]) for n, more in enumerate(([], arguments)))
    assert harness.differences(plain, other)
