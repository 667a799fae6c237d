"""Host snapshots of models on the fake GPU: no copy of the state is whole, so all ranks go back, and end where they should."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ftrun.core.shared.board import Board, F, Head
from ftrun.core.shared.world import read_world
from ftrun.worker.link.fd_store import FdStoreClient
from tests.conftest import wait_for
from tests.e2e import harness
from tests.e2e.harness import kill
from tests.gpu.conftest import RANKS, Outcome, command, finish, named, run, same
from tests.native.fake import Control

EVERY_3 = ("--snapshot-every", "3")
NO_COPY_IS_WHOLE = tuple(kill(rank, "update", 4) for rank in range(RANKS))


def gone_back(outcome: Outcome) -> dict[str, Any]:
    """The account of the incident in which everyone went back."""
    incidents = [line for line in outcome.journal if line.get("note") == "incident"]
    return next((i for i in incidents if i["rollback"]), {"incidents": incidents, "output": outcome.output})


def test_every_rank_dies_in_its_update(clean: Outcome, folder: Path, control: Control) -> None:
    outcome = run(folder, control, faults=NO_COPY_IS_WHOLE, options=EVERY_3)
    same(clean, outcome)
    assert "every rank goes back to the host snapshot" in outcome.output
    assert "2 steps done again from the host snapshot of step 3" in outcome.output
    assert "bit-identical to an uninterrupted run: yes" in outcome.output
    incident = gone_back(outcome)
    assert {s["name"] for s in incident["sources"].values()} == {"snapshot"}
    assert all(s["bytes"] > 0 for s in incident["sources"].values())
    stages = {stage for entry in incident["moves"] for stage, *_ in entry["moves"]}
    assert stages == {"h2d", "broadcast_src", "reload", "broadcast_dst"}


@pytest.mark.slow
def test_a_rank_dies_again_while_everyone_goes_back(clean: Outcome, folder: Path, control: Control) -> None:
    """Ranks that had loaded the snapshot already load it once more, over the state that they use."""
    faults = (*NO_COPY_IS_WHOLE, kill(2, "reset"), kill(0, "restore"))
    outcome = run(folder, control, faults=faults, options=EVERY_3)
    same(clean, outcome)
    assert "from the host snapshot of step 3" in outcome.output


@pytest.mark.slow
def test_a_state_of_many_chunks(tmp_path: Path, folder: Path, control: Control) -> None:
    """19 MiB: three chunks a rank, so that both buffers of each are used again."""
    wide = ("--wide", "60000", "--steps", "6")
    whole = run(tmp_path / "whole", control, *wide)
    outcome = run(folder, control, *wide, faults=NO_COPY_IS_WHOLE, options=EVERY_3)
    same(whole, outcome)
    loads = [move for entry in gone_back(outcome)["moves"] for move in entry["moves"] if move[0] == "h2d"]
    assert len(loads) >= 2 * RANKS, gone_back(outcome)
    assert "from the host snapshot of step 3" in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank 1", "fd store"])
def test_a_death_while_the_state_moves(clean: Outcome, folder: Path, control: Control, victim: str) -> None:
    """A rank's: everybody loads once more, with its replacement. The fd store's: nobody notices."""
    line = command(folder, faults=NO_COPY_IS_WHOLE, options=EVERY_3)
    running = harness.start(folder, line, control.env)
    wait_for(lambda: "goes back to the host snapshot" in running.output, "the decision")
    control.set(rate=100_000)  # everybody now receives for about a second
    fd_store = FdStoreClient(running.run_dir() / "fd-store.sock")
    wait_for(lambda: _passes_on(fd_store, 1, "buffers"), "the buffers of rank 1")
    pids = named(folder, "ftrun fd store") if victim == "fd store" else [holder(running.run_dir(), 1)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not _passes_on(fd_store, 1, "buffers") or "recovered" in running.output, "its end")
    control.set(rate=None)
    outcome = finish(running)
    same(clean, outcome)
    assert "from the host snapshot of step 3" in outcome.output
    assert ("rank 1 died" in outcome.output.split("goes back to the host snapshot")[1]) == (victim == "rank 1")


def holder(run_dir: Path, rank: int) -> int:
    """The process that has a rank now: a spare keeps its name."""
    board = Board.open(run_dir / "board")
    return board.cell(read_world(run_dir, board[Head.PUBLISHED]).places[rank].cell)[F.PID]


def _passes_on(fd_store: FdStoreClient, rank: int, name: str) -> bool:
    try:
        fd = fd_store.get(rank, name)
    except OSError:
        return False
    if fd is not None:
        os.close(fd)
    return fd is not None


# -- the device says no: the next rung, and why ------------------------------------------------------------------------

RESTART = (*EVERY_3, "--max-restarts", "1")


@pytest.mark.slow
def test_no_room_on_the_device_for_the_buffers(clean: Outcome, folder: Path, control: Control) -> None:
    """Each allocation of the state takes 2 MiB, the two buffers 4."""
    control.set(largest=2 << 20)
    outcome = run(folder, control, faults=NO_COPY_IS_WHOLE, options=RESTART)
    same(clean, outcome)
    assert (
        "no room on device" in outcome.output and "the reload from the host snapshot needs 4 MiB more" in outcome.output
    )
    assert "all workers start again" in outcome.output


@pytest.mark.slow
def test_the_buffers_of_another_rank_cannot_be_mapped(clean: Outcome, folder: Path, control: Control) -> None:
    """A replacement maps its rank's three allocations, twice (the first time it looks for a replica), then the others' buffers."""
    control.set(refuse="cuMemImportFromShareableHandle#7")
    outcome = run(folder, control, faults=NO_COPY_IS_WHOLE, options=RESTART)
    same(clean, outcome)
    assert "cannot be mapped: cuMemImportFromShareableHandle: CUDA_ERROR_NOT_PERMITTED" in outcome.output
    assert "all workers start again" in outcome.output
