"""Sealed gradients are what outlives a death at the gate: without them, by a switch that only tests have, the run ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.sharding import faulted

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(("switch", "code"), [("", 0), ("sealed", 75)])
def test_a_death_at_the_gate_with_and_without(folder: Path, switch: str, code: int) -> None:
    outcome = faulted(folder, ["--steps", "6"], [], FTRUN_TEST_PAUSE="swap:3:1", FTRUN_TEST_BREAK=switch)
    assert outcome.code == code, outcome.tail()
    assert ("made from the gradients that it had sealed" in outcome.output) is not bool(switch), outcome.tail()
    assert ("take host snapshots (--snapshot-every" in outcome.output) is bool(switch), outcome.tail()
