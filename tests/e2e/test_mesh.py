"""HSDP over four ranks, two replicas of two shards: what `verify`, `status`, `events` and `timeline` say of the mesh."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import harness
from tests.e2e.harness import kill

SCRIPT = harness.SCRIPTS / "sharded.py"
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


@pytest.mark.slow
def test_a_run_on_a_mesh_says_where_its_ranks_are(folder: Path) -> None:
    """While it trains, when a rank was replaced, and after its end; and the end is that of stock torch."""
    arguments = ["--layout", "hsdp", "--steps", "150"]
    stock = [str(SCRIPT), "--backend", "gloo", "--out", str(folder / "stock" / "out")]
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


@pytest.mark.slow
def test_verify_names_the_shard_that_differs(folder: Path) -> None:
    """A gradient that is another one in the second replica's second shard, in the run with a fault."""
    (folder / "plan.toml").write_text(kill(1, "backward", 1))
    script = str(harness.SCRIPTS / "one_shard_differs.py")
    command = ("verify", "--faults", "plan.toml", "--nproc-per-node", "4", script, "${verify}", "--flaw", "3")
    first, shards, cause, *more = asked(folder, *command, codes=(1,)).splitlines()
    assert re.fullmatch(r"different: first in step 3 .*: gradient of 0\.weight on rank 3", first)
    assert shards == "differs in shards of the gradient of 0.weight: rank 3 (replicate 1, shard 1: rows 7 to 12 of 13)"
    assert cause.startswith("likely cause: the gradient of a shard") and "1 of 1 fault fired" in more
