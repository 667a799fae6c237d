"""`ftrun status`, `events` and `timeline` on one node of several show the whole job."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.e2e import over_nodes
from tests.e2e.harness import Running, kill
from tests.e2e.over_nodes import all_exact
from tests.e2e.test_over_nodes import Stock

STEPS = ("--steps", "60", "--stretch", "0.05")


def picture(node: Running) -> dict[str, Any]:
    """What `ftrun status --json` says on a node."""
    done = over_nodes.ask(node, "status", "--json")
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
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


@pytest.mark.slow
def test_events_and_timeline_of_all_nodes(folder: Path, stock: Stock) -> None:
    """A rank fails on each node; each node tells of both incidents, also of the stages of the node on which nobody failed."""
    begun = over_nodes.begin(folder, STEPS, [kill(2, "backward", 15), kill(1, "forward", 30)])
    outcomes = over_nodes.end(begun)
    all_exact(outcomes, stock(*STEPS), struck=[0, 1])
    for node, (running, outcome) in enumerate(zip(begun, outcomes, strict=True)):
        notes = outcome.notes("node-incident")
        assert {(n["number"], n["node"], n["here"]) for n in notes} == {(i, at, at == node) for i in (1, 2) for at in (0, 1)}
        victims = {(n["number"], n["node"]): [v["rank"] for v in n["victims"]] for n in notes}
        assert victims == {(1, 0): [], (1, 1): [2], (2, 0): [1], (2, 1): []}
        assert all(n["total_ms"] > 0 and n["ms"]["stop"] >= 0 and n["ms"]["reset"] > 0 for n in notes)
        logs = str(next((running.folder / "ftrun-logs").glob("*/journal.jsonl")).parent)
        events = over_nodes.ask(running, "events", logs).stdout
        other = 1 - node
        assert re.search(rf"node {other} \(\S+\) recovered: SIGKILL → rank {(1, 2)[other]} in .* of step .* ms: ", events), events
        assert re.search(r"this node recovered: \d+ ms: .*stop", events), events
        drawn = over_nodes.ask(running, "timeline", logs, *(() if node else ("--incident", "1"))).stdout
        assert re.search(r"^node 0 \(here\)" if node == 0 else r"^node 1 \(here\)", drawn, re.MULTILINE), drawn
        assert re.search(rf"^node {other} ", drawn, re.MULTILINE), drawn
    elsewhere = over_nodes.ask(begun[1], "timeline", str(next((begun[1].folder / "ftrun-logs").glob("*/journal.jsonl")).parent)).stdout
    assert "in which no rank of this node failed" in elsewhere and "SIGKILL → rank 1 in forward of step 30" in elsewhere, elsewhere
