"""What an incident costs each node, counted by the benchmark of many nodes; and that the benchmark runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ftrun.host.nodes.membership.session import until_next_look
from tests.bench import scale, tables
from tests.bench.scale import Shape
from tests.conftest import ROOT


@pytest.mark.parametrize("backend", scale.CARRIERS)
def test_each_node_writes_two_answers_and_rings_only_the_first_one(tmp_path: Path, backend: str) -> None:
    with scale.world(tmp_path, backend, Shape(5, 3)) as running:
        running.fail(1, 0)  # what the nodes tell each other at the start is behind them
        incident = running.fail(2, 1)
    first = max(incident.agents, key=lambda tally: tally.creates)
    assert incident.control > 0 and max(incident.read) < 800, "the places of other nodes' ranks are in none"
    assert sum(tally.creates for tally in incident.agents) == 3, "stop, go and open"
    assert first.creates >= 2
    for tally in incident.agents:
        assert tally.bells == 4 * tally.creates + (0 if tally is first else 2), "an answer rings the first node alone"
        assert 2 <= tally.writes <= 3 + incident.control / 1e3, "two answers, and a beat in a second"
        assert 3 + 2 <= tally.reads <= 3 + 5 * (3 + incident.control / 1e3), "stop, go, open, and what the nodes wrote"


def test_looks_become_rarer_with_each_node() -> None:
    assert until_next_look(0.2, 0, repairing=True, keep_alive=10.0) == 0.02
    assert until_next_look(0.1, 1, repairing=True, keep_alive=10.0) == 0.02, "never more often"
    assert until_next_look(0.2, 63, repairing=False, keep_alive=10.0) == pytest.approx(0.83)
    assert until_next_look(0.2, 63, repairing=True, keep_alive=10.0) == pytest.approx(0.083)
    assert until_next_look(0.2, 5000, repairing=False, keep_alive=10.0) == 2.5, "often enough to beat"


@pytest.mark.slow
def test_the_benchmark_writes_its_table(tmp_path: Path) -> None:
    command = [sys.executable, "tests/bench/scale.py", "--rounds", "2", "--nodes", "2", "--ranks", "2", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = tables.rows("scale", tmp_path).splitlines()[2:]
    assert [line.split("|")[2].strip() for line in lines] == 2 * [
        "1 node of 2 ranks",
        "2 nodes of 1 rank",
        "2 runs at once of 1 node of 2 ranks",
        "2 nodes of 2 ranks",
    ]
    assert "n=4)" in lines[3] and lines[3].count(" times (") == 2
