"""Whole runs on a fake GPU whose driver is as harsh as a driver may be (see tests/native/fake_cuda/fake.hpp)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import wait_for
from tests.e2e import harness
from tests.e2e.harness import kill
from tests.gpu.conftest import RANKS, Outcome, at_step, command, finish, named, run, same
from tests.native.fake import Control

MAKES_OR_GIVES_BACK = {
    "cuMemAlloc",
    "cuMemFree",
    "cuMemAllocHost",
    "cuMemFreeHost",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemUnmap",
    "cuModuleLoadData",
}
EARLY = "the victim's memory was used while its kernel still wrote there"


class Call(NamedTuple):
    """A line of the fake driver's log."""

    pid: int
    ns: int
    name: str


@pytest.fixture
def log(control: Control, tmp_path: Path) -> Path:
    control.set(log=tmp_path / "calls.txt")
    return tmp_path / "calls.txt"


def calls(log: Path) -> list[Call]:
    return [Call(int(pid), int(ns), name) for pid, ns, name, _ in map(str.split, log.read_text().splitlines())]


def stall(outcome: Outcome) -> tuple[int, int]:
    """When the incident began and ended, in ns."""
    (incident,) = [line for line in outcome.journal if line.get("note") == "incident"]
    return incident["began_ns"], incident["began_ns"] + int(1e6 * incident["total_ms"])


@pytest.mark.slow
def test_no_survivor_makes_or_gives_back_memory_in_a_stall(
    clean: Outcome, folder: Path, control: Control, log: Path
) -> None:
    """Either may wait for a kernel that waits for the dead peer. One such kernel is there on each survivor's device."""
    line = command(folder, "--endless", "1:4", faults=(kill(2, "backward", 4),))
    running = harness.start(folder, line, control.env)
    wait_for(lambda: "recovered" in running.output, "the repair, beside a kernel that does not end")
    control.set(release=1)
    outcome = finish(running)
    same(clean, outcome)
    assert "state adopted in place" in outcome.output
    assert (folder / "out" / "endless").exists(), "there was such a kernel"
    begin, end = stall(outcome)
    survivors = {r["pid"] for rank, r in enumerate(outcome.ranks) if rank != 2}
    made = [call for call in calls(log) if call.pid in survivors and call.name in MAKES_OR_GIVES_BACK]
    assert made, "the log has their calls"
    assert not [call for call in made if begin <= call.ns <= end]


@pytest.mark.parametrize(
    ("at", "source"), [("backward", "adopted"), pytest.param("update", "copied", marks=pytest.mark.slow)]
)
def test_a_kernel_of_the_dead_that_still_writes_is_waited_for(
    clean: Outcome, folder: Path, control: Control, at: str, source: str
) -> None:
    """It writes rubbish into a buffer for a second after its process was killed; the buffer goes back to the step's start."""
    outcome = run(folder, control, "--writes", "2:3:1.0", faults=(kill(2, at, 3),))
    same(clean, outcome)
    assert f"state {source}" in outcome.output
    assert (folder / "out" / "writes").exists(), "there was such a kernel"
    begin, end = stall(outcome)
    assert end - begin > 0.5e9, EARLY


@pytest.mark.slow
def test_memory_that_never_gets_quiet_is_not_used(clean: Outcome, folder: Path, control: Control) -> None:
    """The fence has a deadline of five seconds; a replica's copy goes into new memory then."""
    outcome = run(folder, control, "--writes", "2:3:9.0", faults=(kill(2, "backward", 3),))
    assert outcome.code == 0, outcome.output[-4000:]
    assert "its last owner may still write there" in outcome.output
    assert "state copied from a peer" in outcome.output
    for key in ("weights", "optimizer"):
        assert [r[key] for r in outcome.ranks] == [r[key] for r in clean.ranks]


@pytest.mark.parametrize(
    "demanded",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["any thread may import", "with a context only"],
)
def test_the_fd_store_has_a_context_only_where_the_driver_wants_one(
    clean: Outcome, folder: Path, control: Control, log: Path, demanded: bool
) -> None:
    if demanded:
        control.set(**{"import": "context"})
    line = command(folder, "--pause", "0.1", faults=(kill(2, "backward", 6),))
    running = harness.start(folder, line, control.env)
    (fd_store,) = wait_for(lambda: named(folder, "ftrun fd store"), "the fd store")
    outcome = finish(running)
    same(clean, outcome)
    assert "state adopted in place" in outcome.output
    its = [call.name for call in calls(log) if call.pid == fd_store]
    assert "cuMemImportFromShareableHandle" in its
    assert ("cuDevicePrimaryCtxRetain" in its) == demanded


@pytest.mark.slow
def test_memory_that_may_not_be_accessed_costs_the_memory_and_not_the_run(
    clean: Outcome, folder: Path, control: Control
) -> None:
    """Refused is the first one from when every rank has its memory: that of the replacement, for its predecessor's."""
    running = harness.start(folder, command(folder, "--pause", "0.2", faults=(kill(2, "backward", 6),)), control.env)
    wait_for(lambda: all(at_step(folder, rank) >= 2 for rank in range(RANKS)), "two steps of each rank")
    control.set(refuse="cuMemSetAccess#1")
    outcome = finish(running)
    assert outcome.code == 0, outcome.output[-4000:]
    assert "the dead worker's memory is not used" in outcome.output and "cuMemSetAccess" in outcome.output
    assert "state copied from a peer" in outcome.output
    for key in ("weights", "optimizer"):
        assert [r[key] for r in outcome.ranks] == [r[key] for r in clean.ranks]


@pytest.mark.parametrize(
    "shared",
    [pytest.param(True, marks=pytest.mark.slow), False],
    ids=["all ranks on one device", "a device each"],
)
def test_a_spare_has_its_device_open_before_it_is_needed(
    clean: Outcome, folder: Path, control: Control, log: Path, shared: bool
) -> None:
    """Where it can know which: with several devices it opens none, since a context takes hundreds of megabytes."""
    further = ("--device", "1") if shared else ()
    outcome = run(folder, control, "--pause", "0.3", *further, faults=(kill(2, "backward", 6),))
    same(clean, outcome)
    begin, _ = stall(outcome)
    its = [call for call in calls(log) if call.pid == outcome.ranks[2]["pid"]]
    before = {call.name for call in its if call.ns < begin}
    assert ({"cuDevicePrimaryCtxRetain", "cuModuleLoadData"} <= before) == shared, its


def test_what_bits_depend_on_is_told_when_it_is_not_set(folder: Path, control: Control) -> None:
    outcome = run(folder, control, "--steps", "1")
    assert outcome.code == 0
    told = [line for line in outcome.output.splitlines() if "for the same bits set" in line]
    assert len(told) == 1, outcome.output
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in told[0] and "use_deterministic_algorithms(True)" in told[0]
    assert "cudnn.benchmark" not in told[0]


# -- what was reported of real drivers -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_others_do_not_wait_for_the_end_of_the_dead(clean: Outcome, folder: Path, control: Control) -> None:
    """The driver's share of a process's end takes seconds. Only whoever maps the dead's device memory waits for it."""
    control.set(teardown=1.5)
    outcome = run(folder, control, faults=(kill(2, "backward", 3),))
    same(clean, outcome)
    assert outcome.sources() == ["adopt"]
    (incident,) = [line for line in outcome.journal if line.get("note") == "incident"]
    assert incident["ms"]["restore"] > 1000, "the memory was used while the driver had not let go of the dead"
    others = [times for rank, times in incident["ranks"].items() if rank != "2"]
    assert all(times["reset"] < incident["ms"]["restore"] for times in others), "a survivor waited for it as well"


def test_memory_that_a_driver_refuses_until_the_dead_is_reaped_is_adopted(
    clean: Outcome, folder: Path, control: Control
) -> None:
    control.set(teardown=0.3, **{"import": "reaped"})
    outcome = run(folder, control, faults=(kill(2, "backward", 3),))
    same(clean, outcome)
    assert outcome.sources() == ["adopt"], outcome.output[-3000:]
