"""What a gate costs ranks that share cores: real ranks on a real board, and how often the kernel had to wake each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "gate_ranks.py"
ROOT = SCRIPT.parents[4]
RANKS, GATES = 4, 6


@pytest.mark.parametrize("cores", [1, 2])
def test_a_waiting_rank_is_woken_once_and_can_pass_then(tmp_path: Path, cores: int) -> None:
    late = 0.25  # seconds: looks of its own within a step would be seen
    command = [sys.executable, str(SCRIPT), str(tmp_path), *map(str, (RANKS, cores, GATES, late))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    for number in range(GATES):
        slept = {rank: found[number][0] for rank, found in enumerate(ranks)}
        asked = {rank: found[number][1] for rank, found in enumerate(ranks)}
        last = number % RANKS
        assert slept == {rank: int(rank != last) for rank in range(RANKS)}, f"gate {number}, rank {last} came last: {slept}"
        assert asked == {rank: int(rank == last) for rank in range(RANKS)}, f"gate {number} was shut when others woke: {asked}"
