"""What a gate costs ranks that share cores: real ranks on a real board, and how often the kernel had to wake each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "scripts" / "gate_ranks.py"
ROOT = SCRIPT.parents[4]
RANKS, GATES, CORES = 4, 4, (1, 2)
LATE = 0.25  # seconds that the last one comes after all others: if those looked by themselves in a step, it would be seen


def test_a_waiting_rank_is_woken_once_and_can_pass_then(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), *map(str, (RANKS, GATES, LATE, *CORES))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    for cores in CORES:
        ranks = [json.loads((tmp_path / f"{cores}-{rank}.json").read_text()) for rank in range(RANKS)]
        for number in range(GATES):
            slept = [found[number][0] for found in ranks]
            asked = [found[number][1] for found in ranks]
            last = number % RANKS
            assert slept == [int(rank != last) for rank in range(RANKS)], f"gate {number}, rank {last} came last: {slept}"
            assert asked == [int(rank == last) for rank in range(RANKS)], f"gate {number} was shut when others woke: {asked}"
