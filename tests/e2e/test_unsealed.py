"""Sealed gradients are what outlives a death at the gate: without them the run ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import injected
from tests.e2e.sharding import faulted

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(("without", "code"), [("", 0), ("sealed", 75)])
def test_a_death_at_the_gate_with_and_without(folder: Path, without: str, code: int) -> None:
    outcome = faulted(folder, ["--steps", "6"], [], **injected.env("swap:3:1", without))
    assert outcome.code == code, outcome.tail()
    assert ("made from the gradients that it had sealed" in outcome.output) is not bool(without), outcome.tail()
    assert ("take host snapshots (--snapshot-every" in outcome.output) is bool(without), outcome.tail()
