"""Whole runs on the fake GPU: processes, memory, streams and kills are real, the device is not."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.harness import kill
from tests.gpu import conftest
from tests.gpu.conftest import Outcome
from tests.native.fake import Control


def test_an_uninterrupted_run_uses_the_device(clean: Outcome) -> None:
    assert clean.code == 0, clean.output[-4000:]
