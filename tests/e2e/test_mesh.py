"""HSDP over four ranks, two replicas of two shards: what `verify`, `status`, `events` and `timeline` say of the mesh."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import harness
from tests.e2e.harness import kill

SCRIPT = harness.SCRIPTS / "sharded.py"
WIDTH = 47  # of the script's layers
pytestmark = pytest.mark.timeout(300)


def at(rank: int) -> dict[str, int]:
    return {"replicate": rank // 2, "shard": rank % 2}


def words(rank: int) -> str:
    return f"replicate {rank // 2}, shard {rank % 2}"


def asked(folder: Path, *command: str, env: dict[str, str] | None = None, codes: tuple[int, ...] = (0, 1)) -> str:
    """What a command of ftrun's prints."""
    done = subprocess.run(
        [harness.tool("ftrun"), *command],
        cwd=folder,
        env=harness.environment(folder, env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode in codes, done.stderr
    return done.stdout


def test_a_run_on_a_mesh_says_where_its_ranks_are(folder: Path) -> None:
    """While it trains, when a rank was replaced, and after its end; and the end is that of stock torch."""
    arguments = ["--layout", "hsdp", "--steps", "150"]
    stock = [sys.executable, "-m", "tests.e2e.stock", "4", str(SCRIPT), "--backend", "gloo", "--out", str(folder / "stock" / "out")]
    paths = f"{harness.ROOT}:{harness.SCRIPTS}"
    wanted = harness.by_torch(folder / "stock", [*stock, *arguments], env={"PYTHONPATH": paths}, timeout=200)
    command = harness.script_command(folder, SCRIPT, ["--out", str(folder / "out"), *arguments], [kill(3, "backward", 5)])
    running = harness.start(folder, command)
    deadline = time.monotonic() + 60
    picture: dict[str, Any] = {}
    while not picture.get("incidents") and time.monotonic() < deadline and running.process.poll() is None:
        if list((folder / "runs").glob("*/board")):
            picture = json.loads(asked(folder, "status", "--json", codes=(0, 1, 3, 4)) or "{}")
    outcome = harness.finish(running, timeout=200)
    harness.same(wanted, outcome)
    assert len(harness.deaths(outcome)) == 1 and picture.get("incidents"), outcome.tail()

    assert picture["mesh"] == {"replicate": 2, "shard": 2}
    held = {w["rank"]: w["mesh"] for w in picture["workers"] if w["rank"] is not None}
    assert held == {rank: at(rank) for rank in range(4)}

    told = asked(folder, "timeline")
    assert f"rank 3 ({words(3)}), in the" in " ".join(told.split())
    lines = told.splitlines()
    for label, rank in (("rank 0 healthy", 0), ("rank 2 healthy", 2), ("rank 3 FAILED", 3), ("spare 4 → 3", 3)):
        below = lines[next(i for i, line in enumerate(lines) if line.startswith(label)) + 1]
        assert below.startswith(f"  {words(rank)} "), told
    raw = json.loads(asked(folder, "timeline", "--json"))
    assert raw["victims"][0]["mesh"] == at(3) and raw["mesh"]["ranks"] == {str(rank): at(rank) for rank in range(4)}
    assert re.findall(r"  mesh: (.*)", asked(folder, "events")) == ["replicate 2 × shard 2"], "told once"


def test_verify_names_the_shards_that_differ(folder: Path) -> None:
    """With a part of the repair left out on purpose, gradients of the step that was cut off are added to those of the next try."""
    (folder / "plan.toml").write_text(kill(1, "backward", 2))
    command = ["verify", "--faults", "plan.toml", "--nproc-per-node", "4", str(SCRIPT), "--layout", "hsdp", "--out", "${verify}"]
    broken = {"FTRUN_TEST_BREAK": "sharded"}
    result = json.loads(asked(folder, *command[:1], "--json", *command[1:], env=broken, codes=(1,)))
    found = result["difference"]
    assert result["verdict"] == "different" and found["after_fault"], result
    assert found["shard"].partition(":")[0] == "gradient" and found["shard"] in found["names"]
    assert list(found["shards"]) == [str(rank) for rank in found["names"][found["shard"]]]
    said = asked(folder, *command, env=broken, codes=(1,)).splitlines()
    assert said[0].startswith("different: first in step ") and "gradient of " in said[1], said
    name = re.match(r"differs in shards of the gradient of (\S+): rank ", said[1])
    assert name, said
    for rank, part in re.findall(r"rank (\d) \((.*?)\)", said[1]):
        (shard,) = re.findall(r"shard (\d)", part)
        rows = {"0": f"rows 0 to 23 of {WIDTH}", "1": f"rows 24 to 46 of {WIDTH}"}[shard]
        assert part == f"{words(int(rank))}: {rows}", said
