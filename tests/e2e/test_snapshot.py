"""The host snapshot: when every replica of the state is lost at once, all ranks go back to it and still end on the same weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from ftrun.worker.link.fd_store import FdStoreClient
from tests.e2e import harness
from tests.e2e.conftest import Reference
from tests.e2e.harness import kill

EVERY_3 = ["--max-replacements", "50", "--snapshot-every", "3"]


def all_killed(at: str, step: int) -> list[str]:
    return [kill(rank, at, step) for rank in range(harness.RANKS)]


def test_every_rank_dies_in_its_update(stock: Reference, folder: Path) -> None:
    """No arena is whole then: the step was taken by nobody to its end."""
    outcome = harness.ftrun(folder, [], all_killed("update", 7), options=EVERY_3)
    harness.same(stock(), outcome)
    assert harness.replaced_ranks(outcome) == {0, 1, 2, 3}
    assert "every rank goes back to the host snapshot" in outcome.output
    assert "2 steps done again from the host snapshot of step 6" in outcome.output
    incident = outcome.notes("incident")[-1]
    assert incident["rollback"] and incident["redone"] == 2 and incident["resume"] == 6
    assert {s["name"] for s in incident["sources"].values()} == {"snapshot"}
    assert all(s["bytes"] > 0 for s in incident["sources"].values())
    assert "bit-identical to an uninterrupted run: yes" in outcome.output
    summary = outcome.notes("summary")[0]
    assert incident["again_ms"] > 0 and summary["redone"] == sum(i["redone"] for i in outcome.notes("incident"))
    assert summary["lost_ms"] == pytest.approx(sum(i["total_ms"] + i["again_ms"] for i in outcome.notes("incident")))
    check_moves(incident)
    check_drawings(outcome.folder)


def check_moves(incident: dict[str, Any]) -> None:
    """Every rank noted when it loaded and broadcast its share, and took its own and everybody else's."""
    noted = {entry["rank"]: entry["moves"] for entry in incident["moves"]}
    assert set(noted) == set(range(harness.RANKS))
    for rank, moves in noted.items():
        assert {(stage, source) for stage, source, *_ in moves} == {
            ("h2d", rank),
            ("broadcast_src", rank),
            ("reload", rank),
            *(("broadcast_dst", other) for other in range(harness.RANKS) if other != rank),
        }
        times = incident["ranks"][str(rank)]
        for _, _, begin, end in moves:
            assert times.get("moving", 0) <= begin <= end <= times["restore"]


def check_drawings(folder: Path) -> None:
    """Figure 004 in every form of `ftrun timeline`."""

    def timeline(*args: str) -> str:
        command = [harness.tool("ftrun"), "timeline", *args]
        done = subprocess.run(
            command, cwd=folder, env=harness.environment(folder), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    stages = ("H2D", "Broadcast (src)", "Reload weights", "Broadcast (dst)")
    text = timeline()
    assert "how the bytes moved" in text and all(f"{stage}:" in text for stage in stages)
    rows = [line.split() for line in text.splitlines() if line[9:14] in ("sends", "takes")]
    assert [row[0] + row[1] for row in rows[::2]] == [f"rank{rank}" for rank in range(harness.RANKS)]
    drawn = ET.fromstring(timeline("--format", "svg"))
    kinds = [node.get("data-kind") for node in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    assert all(kinds.count(stage) >= harness.RANKS for stage in stages)
    assert "Broadcast (dst), rank 2&#x27;s bytes" in timeline("--format", "html")
    trace = json.loads(timeline("--format", "trace"))["traceEvents"]
    assert set(stages) <= {event["name"] for event in trace}


@pytest.mark.slow
def test_with_loader_processes_and_gradients_that_live_on(stock: Reference, folder: Path) -> None:
    arguments = ["--two-optims", "--scaler", "--local-buffers", "--accum", "across", "--data", "loader"]
    outcome = harness.ftrun(folder, arguments, all_killed("update", 8), options=EVERY_3)
    harness.same(stock(*arguments), outcome)
    assert "from the host snapshot of step 6" in outcome.output


@pytest.mark.slow
def test_a_rank_dies_again_while_everyone_goes_back(stock: Reference, folder: Path) -> None:
    """Ranks that had loaded the snapshot already load it once more, over the state that they use."""
    faults = [*all_killed("update", 7), kill(2, "reset"), kill(0, "restore")]
    outcome = harness.ftrun(folder, [], faults, options=EVERY_3)
    harness.same(stock(), outcome)
    assert len(outcome.notes("fault")) == 6, outcome.tail()
    assert [a["resume"] for a in outcome.actions("Publish") if a["rollback"]][-1] == 6


@pytest.mark.slow
def test_a_kept_state_is_still_preferred(stock: Reference, folder: Path) -> None:
    outcome = harness.ftrun(folder, [], [kill(1, "backward", 4), kill(2, "update", 6)], options=EVERY_3)
    harness.same(stock(), outcome)
    assert not any(a["rollback"] for a in outcome.actions("Publish"))
    assert "0 committed steps lost" in outcome.output


@pytest.mark.slow
def test_a_snapshot_that_was_damaged_is_refused(stock: Reference, folder: Path) -> None:
    """One flipped bit in one rank's share: nobody trains on with it."""
    options = ["--max-replacements", "50", "--snapshot-every", "1000", "--max-restarts", "1"]
    command = harness.ftrun_command(folder, ["--stretch", "0.02"], all_killed("update", 7), options=options)
    running = harness.start(folder, command)
    fd_store = FdStoreClient(running.run_dir() / "fd-store.sock")
    deadline = time.monotonic() + 60
    while (fd := _kept(fd_store, 2)) is None:
        assert time.monotonic() < deadline and running.process.poll() is None, running.output
        time.sleep(0.01)
    share = 1 << 20
    byte = os.pread(fd, 1, share + 100)
    os.pwrite(fd, bytes([byte[0] ^ 8]), share + 100)
    os.close(fd)
    outcome = harness.finish(running)
    assert "share in the snapshot of step 0 does not match its checksum" in outcome.output
    assert "all workers start again" in outcome.output
    harness.same(stock("--stretch", "0.02"), outcome, ignore=["history"])


def _kept(fd_store: FdStoreClient, rank: int) -> int | None:
    try:
        return fd_store.get(rank, "snapshot")
    except OSError:
        return None  # the fd store is not up yet


def test_a_restart_from_the_beginning_counts_what_is_done_again(stock: Reference, folder: Path) -> None:
    """Steps 0 to 7 had passed their gate, and a step took what the run's pace says."""
    outcome = harness.ftrun(folder, ["--stretch", "0.02"], all_killed("update", 7), options=["--max-restarts", "1"])
    harness.same(stock("--stretch", "0.02"), outcome, ignore=["history"])
    (incident,) = outcome.notes("incident")
    assert incident["restart"] and incident["redone"] == 8
    assert incident["again_ms"] >= 8 * 20
    assert "8 steps done again since all workers started again" in outcome.output
    assert "1 incident, 8 steps done again, " in outcome.output
    lost = re.search(r"8 steps done again, ([\d.]+) s lost", outcome.output)
    assert lost and float(lost[1]) == pytest.approx((incident["total_ms"] + incident["again_ms"]) / 1000, abs=0.01)


@pytest.mark.slow
def test_without_snapshots_it_ends_soon_and_says_why(folder: Path) -> None:
    outcome = harness.ftrun(folder, [], all_killed("update", 7))
    assert outcome.code == 1
    assert "no rank's memory is whole as of step 8" in outcome.output
    assert outcome.seconds < 40
