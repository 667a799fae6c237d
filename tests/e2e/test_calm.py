"""A sample of `make calm`: jitter, long calls, a debugger, a stopped launcher and busy processors are no faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import calm


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_nothing_is_reported_of_a_run_that_is_only_odd(folder: Path) -> None:
    said: list[str] = []
    found = calm.calm(folder, calm.QUICK, said.append)
    assert found == [], "\n".join(said)
    assert any("launcher stopped" in line for line in said)
