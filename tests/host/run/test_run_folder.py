"""The run's folder is full, or goes away under the run: a sentence, exit 69, and nobody left. And it does not fill by itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Ftrun, Run, small_file_system, wait_for

WAITS = "import time; print('up', flush=True); time.sleep(600)"
TRAINS = """
import os, time, torch, torch.distributed as dist, ftrun
dist.init_process_group("ftrun")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))  # a kill may come in an update
opt = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(model=model, optimizer=opt)
for step in job.steps(10_000):
    with step:
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
    time.sleep(0.02)
"""


def _nobody_left(run: Run) -> None:
    wait_for(lambda: not run.pids("ftrun"), "the end of every process", 10)
    assert "Traceback" not in run.stderr, run.stderr


def _remove(folder: Path) -> None:
    """Also while somebody writes a file there."""

    def gone() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    wait_for(gone, "the folder to be gone")


def _fill(path: Path) -> Path:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return path


@pytest.mark.parametrize("kilobytes", [0, 4, 24, 64, 200])
def test_a_file_system_that_is_full_from_the_start(ftrun: Ftrun, kilobytes: int) -> None:
    with small_file_system(ftrun.runs_root, (kilobytes or 4) / 1024):
        if not kilobytes:
            _fill(ftrun.runs_root / "ballast")
        run = ftrun.start("--nproc-per-node", 2, "--spares", 0, ftrun.script("print('ran')"))
        assert run.wait() == 69, run.stderr
        _nobody_left(run)
        assert not [name for name in os.listdir(ftrun.runs_root) if name != "ballast"]
    said = run.stderr.splitlines()[-1]
    assert said.startswith("ftrun: error: ") and "set FTRUN_RUNS_ROOT" in said
    assert "ran" not in run.stdout


def test_the_folder_is_removed_and_then_a_rank_dies(ftrun: Ftrun) -> None:
    """As by a job that cleans /dev/shm. A run that is not repaired in place starts its workers anew, which needs the folder."""
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, "--max-restarts", 3, ftrun.script(WAITS))
    wait_for(lambda: run.stdout.count("up") == 2, "the workers")
    _remove(run.dir)
    os.kill(run.pid("ftrun rank 1"), signal.SIGKILL)
    assert run.wait() == 69, run.stderr
    _nobody_left(run)
    assert "was removed while the run needed it" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("spares", [0, 1])
def test_the_folder_is_removed_and_then_a_protected_rank_dies(ftrun: Ftrun, spares: int) -> None:
    run = ftrun.start("--nproc-per-node", 2, "--spares", spares, ftrun.script(TRAINS), OMP_NUM_THREADS="1")
    run.wait_output("protected: a rank that dies")
    if spares:
        wait_for(lambda: list((run.dir / "notes").glob("parked-*.json")), "the spare")
    _remove(run.dir)
    os.kill(run.pid("ftrun rank 1"), signal.SIGKILL)
    assert run.wait() == 69, run.stderr
    _nobody_left(run)
    assert "was removed while the run needed it" in run.stderr


@pytest.mark.slow
def test_the_reserve_is_used_up(ftrun: Ftrun) -> None:
    """The first repair goes on in it; the second finds nothing."""
    with small_file_system(ftrun.runs_root, 3):
        options = ("--nproc-per-node", 2, "--spares", 1, "--max-replacements", 9)
        run = ftrun.start(*options, ftrun.script(TRAINS), OMP_NUM_THREADS="1")
        wait_for(lambda: list((run.dir / "notes").glob("parked-*.json")), "the spare")
        ballast = _fill(ftrun.runs_root / "ballast")
        asked = ftrun.call("status", run.dir.name, "--json")
        assert asked.returncode == 0 and json.loads(asked.stdout)["world_size"] == 2, asked
        os.kill(run.pid("ftrun rank 1"), signal.SIGKILL)
        run.wait_output("recovered in")
        wait_for(lambda: run.pids("ftrun spare"), "another spare")
        _fill(ftrun.runs_root / "more")
        os.kill(run.pid("ftrun rank 1"), signal.SIGKILL)
        assert run.wait() == 69, run.stderr
        _nobody_left(run)
        assert ballast.exists()
    assert "has no room left for the run's own files" in run.stderr


@pytest.fixture
def short(ftrun: Ftrun) -> Iterator[Ftrun]:
    """Runs in a folder of a short name: in a long one the sockets of multiprocessing have no place."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        ftrun.runs_root = Path(folder)
        ftrun.env["FTRUN_RUNS_ROOT"] = folder
        yield ftrun


@pytest.mark.slow
def test_repairs_leave_nothing_in_the_folder(short: Ftrun) -> None:
    ftrun = short
    options = ("--nproc-per-node", 2, "--spares", 1, "--max-replacements", 99)
    run = ftrun.start(*options, ftrun.script(TRAINS), OMP_NUM_THREADS="1")
    folder = run.dir

    def names() -> list[str]:
        """Of all files, whatever number they have; where a rank's Python was is written now and then."""
        found = (f"{os.path.relpath(at, folder)}/{name}" for at, _, files in os.walk(folder) for name in (*files, "."))
        return sorted(re.sub("[0-9]+", "N", name) for name in found if "where-" not in name)

    def settled() -> bool:
        """Nothing is left of the dead rank: there are two ranks and a spare, of which one was there from the start."""
        found = names()
        return [found.count(name) for name in ("mp-N/.", "notes/parked-N.json", "./reserve")] == [3, 2, 1]

    first: list[str] = []
    for repair in range(1, 6):
        wait_for(lambda: run.pids("ftrun spare"), "a spare")
        os.kill(run.pid("ftrun rank 1"), signal.SIGKILL)
        run.wait_output("recovered in", repair)
        wait_for(settled, "the dead rank to be forgotten, and another spare")
        first = first or names()
    assert names() == first
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM, run.stderr
