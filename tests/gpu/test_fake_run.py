"""Whole runs on the fake GPU: processes, memory, streams and kills are real, the device is not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.e2e import harness
from tests.e2e.harness import kill
from tests.gpu.conftest import Outcome, at_step, command, finish, named, run, same
from tests.native.fake import Control

SLOW_STREAM = 400_000  # bytes a second: an update of this model then takes about 0.2 s


@pytest.mark.parametrize(
    ("at", "step", "source"),
    [
        ("backward", 3, "adopted"),
        pytest.param("update", 4, "copied from a peer", marks=pytest.mark.slow),
        pytest.param("update", 0, "copied from a peer", marks=pytest.mark.slow),
    ],
)
def test_a_killed_worker_is_replaced_exactly(
    clean: Outcome, folder: Path, control: Control, at: str, step: int, source: str
) -> None:
    outcome = run(folder, control, faults=(kill(2, at, step),))
    same(clean, outcome)
    assert f"state {source}" in outcome.output
    assert "bit-identical to an uninterrupted run: yes" in outcome.output


def test_a_buffer_that_each_rank_updates_in_its_own_way_is_named(folder: Path, control: Control) -> None:
    outcome = run(folder, control, "--apart", faults=(kill(2, "update", 4),))
    assert outcome.code == 0 and "state copied from a peer" in outcome.output
    assert "not known (since step 5: buffers that the update wrote" in outcome.output, outcome.output[-4000:]


def test_an_update_that_the_device_had_not_finished_is_known_to_be_torn(
    clean: Outcome, folder: Path, control: Control
) -> None:
    """The worker was in the next step already; only the word written in stream order tells."""
    control.set(rate=SLOW_STREAM)
    outcome = run(folder, control, faults=(kill(2, "idle", 5),))
    same(clean, outcome)
    assert "state copied from a peer" in outcome.output


def test_a_broken_context_costs_the_process_and_not_the_memory(clean: Outcome, folder: Path, control: Control) -> None:
    outcome = run(folder, control, "--wild", "1:3")
    same(clean, outcome)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in outcome.output
    assert "state adopted in place, 0 B moved" in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("at", ["idle", "forward", "gate", "stop", "reset", "restore"])
def test_kills_elsewhere(clean: Outcome, folder: Path, control: Control, at: str) -> None:
    first = () if at in ("idle", "forward", "gate") else (kill(0, "backward", 2),)
    outcome = run(folder, control, faults=(*first, kill(3, at, 2)))
    same(clean, outcome)


# -- the fd store and the driver say no ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_that_cannot_be_mapped_is_made_anew_from_a_replica(
    clean: Outcome, folder: Path, control: Control
) -> None:
    """The replacement's first import is that of its own memory; the second, a replica's, is allowed."""
    control.set(refuse="cuMemImportFromShareableHandle#1")
    outcome = run(folder, control, faults=(kill(2, "backward", 3),))
    assert outcome.code == 0, outcome.output[-4000:]
    assert "the dead worker's memory is not used" in outcome.output
    assert "state copied from a peer" in outcome.output
    assert [r["weights"] for r in outcome.ranks] == [r["weights"] for r in clean.ranks]
    assert [r["optimizer"] for r in outcome.ranks] == [r["optimizer"] for r in clean.ranks]


def test_an_fd_store_that_may_not_import_says_so_and_a_replacement_falls_to_a_restart(
    clean: Outcome, folder: Path, control: Control
) -> None:
    control.set(refuse="cuMemImportFromShareableHandle")
    program, *arguments = command(folder, faults=(kill(2, "backward", 3),))
    outcome = finish(harness.start(folder, [program, "--max-restarts", "1", *arguments], control.env))
    same(clean, outcome)
    assert "the fd store holds device memory by its descriptor only" in outcome.output
    assert "CUDA_ERROR_NOT_PERMITTED" in outcome.output


@pytest.mark.slow
def test_no_room_for_the_parameters(folder: Path, control: Control) -> None:
    control.set(memory=1 << 20)
    outcome = run(folder, control)
    assert outcome.code == 1
    assert "no room on device" in outcome.output and "MiB are free" in outcome.output


@pytest.mark.slow
def test_no_room_for_the_optimizer_state(folder: Path, control: Control) -> None:
    """Parameters and buffers take an allocation of 2 MiB each; the state that the first update makes needs a third."""
    control.set(memory=17 << 19)
    outcome = run(folder, control, "--wide", "8192")
    assert outcome.code == 1
    assert "no room on device" in outcome.output


def test_a_device_that_cannot_share_memory_is_refused(folder: Path, control: Control) -> None:
    control.set(vmm=0)
    outcome = run(folder, control)
    assert outcome.code == 1
    assert "DeviceError: Fake GPU" in outcome.output and "cannot share its memory between processes" in outcome.output
    assert "run the script without protect()" in outcome.output


@pytest.mark.slow
def test_a_device_that_says_it_shares_and_does_not_is_refused(folder: Path, control: Control) -> None:
    control.set(refuse="cuMemExportToShareableHandle")
    outcome = run(folder, control)
    assert outcome.code == 1
    assert "did not give memory that other processes can map" in outcome.output
    assert "CUDA_ERROR_NOT_PERMITTED" in outcome.output and "no room" not in outcome.output


@pytest.mark.slow
def test_a_lost_device_ends_the_run_with_its_name(folder: Path, control: Control) -> None:
    line = command(folder, "--steps", "200", "--pause", "0.02", replacements=2)
    running = harness.start(folder, line, control.env)
    wait_for(lambda: at_step(folder, 2) > 3, "some steps")
    control.set(lost=2)
    outcome = finish(running)
    assert outcome.code != 0
    assert "CUDA_ERROR_UNKNOWN" in outcome.output


@pytest.mark.slow
def test_a_new_fd_store_gets_the_device_memory_too(folder: Path, control: Control) -> None:
    running = harness.start(folder, command(folder, "--steps", "60", "--pause", "0.05"), control.env)
    wait_for(lambda: at_step(folder, 2) > 2, "some steps")
    (fd_store,) = named(folder, "ftrun fd store")
    kept = _kept(fd_store)
    os.kill(fd_store, signal.SIGKILL)
    wait_for(lambda: [p for p in named(folder, "ftrun fd store") if p != fd_store], "a new fd store")
    (new,) = named(folder, "ftrun fd store")
    wait_for(lambda: _kept(new) >= kept > 0, "the new fd store to have every rank's device memory")
    (victim,) = named(folder, "ftrun rank 1")
    os.kill(victim, signal.SIGKILL)
    outcome = finish(running)
    assert outcome.code == 0, outcome.output[-4000:]
    assert "state adopted in place" in outcome.output or "state copied from a peer" in outcome.output
    assert len({r["weights"] for r in outcome.ranks}) == 1


def _kept(pid: int) -> int:
    """Descriptors of device memory that a process has."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += os.readlink(entry).startswith("/memfd:fake-cuda")
        except OSError:
            pass
    return count
