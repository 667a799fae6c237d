"""Sources that cannot be used, and an fd store that dies, while a state moves: the next source is taken, the result stays the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from ftrun.worker.link.fd_store import FdStoreClient
from tests.conftest import small_file_system
from tests.e2e import harness
from tests.e2e.conftest import Reference
from tests.e2e.harness import kill

T = TypeVar("T")
SLOW = ["--stretch", "0.02"]


def until(running: harness.Running, condition: Callable[[], T | None], what: str) -> T:
    """The first value of `condition` that is not None."""
    deadline = time.monotonic() + 60
    while (value := condition()) is None:
        assert running.process.poll() is None, f"ended before {what}\n{running.output}"
        assert time.monotonic() < deadline, f"waited for {what}\n{running.output}"
        time.sleep(0.002)
    return value


def kept(running: harness.Running, rank: int, name: str) -> int:
    fd_store = FdStoreClient(running.run_dir() / "fd-store.sock")

    def ask() -> int | None:
        try:
            return fd_store.get(rank, name)
        except OSError:
            return None  # not up yet

    return until(running, ask, f"{name} of rank {rank}")


def pid_of(running: harness.Running, name: str) -> int:
    found = [p for p in harness.strays(running.folder) if Path(f"/proc/{p}/comm").read_text().strip() == name]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.slow
def test_a_replica_of_another_layout_is_passed_over(stock: Reference, folder: Path) -> None:
    """What rank 2 says of its memory is not true any more: rank 1, killed in its update, takes rank 3's."""
    command = harness.ftrun_command(folder, SLOW, [kill(1, "update", 7)], options=["--max-replacements", "50"])
    running = harness.start(folder, command)
    fd = kept(running, 2, "arena")
    at = os.fstat(fd).st_size // 4 * 3

    def renamed() -> bool | None:
        data = os.pread(fd, 1 << 16, at)
        # only once optimizer state is laid out: it writes all of it anew then
        place = data.find(b"param.0.module.first.bias")
        if b"optim." not in data or b"reducers" not in data or place < 0:
            return None
        os.pwrite(fd, b"X", at + place + len(b"param.0.module.first.bia"))
        return True

    until(running, renamed, "the manifest of rank 2")
    os.close(fd)
    outcome = harness.finish(running)
    harness.same(stock(*SLOW), outcome)
    source = outcome.notes("incident")[0]["sources"]["1"]
    assert source["name"] == "peer" and source["bytes"] > 10_000
    assert "0 committed steps lost" in outcome.output


@pytest.mark.slow
def test_the_fd_store_dies_while_everyone_goes_back(stock: Reference, folder: Path) -> None:
    """With it goes what the dead ranks had kept: either the snapshot was mapped by then, or all workers start again."""
    faults = [kill(rank, "update", 7) for rank in range(harness.RANKS)]
    options = ["--max-replacements", "50", "--snapshot-every", "3", "--max-restarts", "1"]
    running = harness.start(folder, harness.ftrun_command(folder, [], faults, options=options))
    until(running, lambda: "goes back to the host snapshot" in running.output or None, "the decision")
    os.kill(pid_of(running, "ftrun fd store"), signal.SIGKILL)
    outcome = harness.finish(running)
    harness.same(stock(), outcome)


@pytest.mark.slow
def test_a_small_shared_memory_file_system_is_enough(stock: Reference, folder: Path) -> None:
    """A container's /dev/shm may hold a few MB: segments, snapshots and buffers are not made there."""
    with small_file_system(folder / "runs", 2):
        faults = [kill(rank, "update", 7) for rank in range(harness.RANKS)]
        options = ["--max-replacements", "50", "--snapshot-every", "3"]
        outcome = harness.ftrun(folder, [], faults, options=options)
        harness.same(stock(), outcome)
        assert "from the host snapshot of step 6" in outcome.output
