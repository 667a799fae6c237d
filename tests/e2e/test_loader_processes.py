"""A loader's processes draw as they do without ftrun, and those of a replacement as its predecessor's would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import harness

SCRIPT = harness.SCRIPTS / "loader_processes.py"
SLOW = pytest.mark.slow


def digests(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "out").glob("digest-*")}


@pytest.mark.timeout(400)  # from Python 3.14 on each process of a loader imports torch anew
@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        pytest.param("distributed", [(0, 1, 2), (1, "before", 1)], id="distributed", marks=SLOW),
        pytest.param("persistent", [(0, 3, 3), (1, 0, 1), (2, 3, 0)], id="persistent", marks=SLOW),
        pytest.param("persistent", [(0, 0, 3), (2, "before", 2), (2, 1, 2)], id="persistent-twice", marks=SLOW),
        pytest.param("anew", [(0, 2, 1), (1, 0, 3), (2, "before", 0)], id="anew", marks=SLOW),
        pytest.param("stream", [(0, 1, 0), (1, "before", 1), (2, 2, 3)], id="stream", marks=SLOW),
    ],
)
def test_a_run_ends_as_without_ftrun(folder: Path, kind: str, faults: list[Any]) -> None:
    stock = [str(SCRIPT), str(folder / "stock/out"), kind, "()"]
    plain = harness.by_torch(folder / "stock", stock, 0)
    assert plain.code == 0, plain.tail()
    arguments = [str(folder / "out"), kind, repr(tuple(faults))]
    command = harness.script_command(folder, SCRIPT, arguments)
    outcome = harness.finish(harness.start(folder, command, {"CONVERTED": "1"}), 0)
    assert outcome.code == 0, outcome.tail()
    assert len(harness.deaths(outcome)) == len(faults), outcome.tail()
    assert digests(folder) == digests(folder / "stock"), outcome.tail()
    assert "uninterrupted run: yes" in outcome.output, outcome.tail()
