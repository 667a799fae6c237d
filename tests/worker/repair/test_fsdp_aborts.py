"""A step that is cut off anywhere inside torch's FSDP leaves nothing behind; torch's own reset does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ftrun.core.tried import version_of
from tests.e2e import harness

SCRIPT = Path(__file__).with_name("scripts") / "aborts.py"


def cut_off(folder: Path, every: int, how: str, shape: str) -> tuple[int, int]:
    """How often the step was cut off, and how often the redone one gave other gradients."""
    command = [str(SCRIPT), str(every), how, shape]
    outcome = harness.by_torch(folder, command, env={"PYTHONPATH": str(harness.ROOT)}, timeout=4 * harness.TIMEOUT)
    found = re.search(r"(\d+) cut off, (\d+) different", outcome.output)
    assert found, outcome.tail()
    return int(found[1]), int(found[2])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("shape", "every"),
    [("fsdp", 41), pytest.param("fsdp", 3, marks=pytest.mark.slow), pytest.param("hsdp", 3, marks=pytest.mark.slow)],
)
def test_a_step_cut_off_anywhere_is_done_again_alike(tmp_path: Path, shape: str, every: int) -> None:
    done, wrong = cut_off(tmp_path, every, "ours", shape)
    assert done >= 10 and wrong == 0


@pytest.mark.skipif(version_of(torch.__version__)[:2] >= (2, 15), reason="torch's own reset is whole there")
@pytest.mark.timeout(900)
def test_by_torchs_reset_alone_it_is_not(tmp_path: Path) -> None:
    done, wrong = cut_off(tmp_path, 41, "alone", "fsdp")
    assert done >= 1 and wrong >= 1
