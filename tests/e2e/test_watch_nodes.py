"""`ftrun status`, `events` and `timeline` on one node of several show the whole job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import wait_for
from tests.e2e import over_nodes
from tests.e2e.harness import Running, kill
from tests.e2e.test_over_nodes import Stock, all_exact

STEPS = ("--steps", "60", "--stretch", "0.05")


def picture(node: Running) -> dict[str, Any]:
    """What `ftrun status --json` says on a node."""
    done = over_nodes.ask(node, "status", "--json")
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_status_of_all_nodes(folder: Path, stock: Stock) -> None:
    begun = over_nodes.begin(folder, STEPS, [kill(2, "backward", 20)])
    over_nodes.Killer(begun, 0).wait_for_all(4)
    pictures: list[dict[str, Any]] = []

    def all_healthy() -> bool:
        pictures[:] = [picture(node) for node in begun]
        return all([e["healthy"] for e in p["nodes"]] == [2, 2] and {e["state"] for e in p["nodes"]} == {"healthy"} for p in pictures)

    wait_for(all_healthy, "two healthy nodes", 60.0)
    for at, found in enumerate(pictures):
        assert [e["ranks"] for e in found["nodes"]] == [[0, 1], [2, 3]]
        assert [e["here"] for e in found["nodes"]] == [at == 0, at == 1] and found["state"] == "healthy"
    text = over_nodes.ask(begun[0], "status").stdout
    assert "2 nodes, 4/4 ranks healthy" in text, text
    wait_for(lambda: picture(begun[0])["nodes"][1]["replacements"] == 1, "news of the replacement on node 1", 60.0)
    outcomes = over_nodes.end(begun)
    all_exact(outcomes, stock(*STEPS), struck=[1])
