"""`make gpu` itself: without a GPU, under a budget, and beside a driver that never returns; on the fake driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.gpu.machine import ROOT
from tests.gpu.pack.table import CHECKS, Needs, chosen
from tests.native.fake import Control


class Packed(NamedTuple):
    code: int
    output: str
    rows: dict[str, dict[str, Any]]
    seconds: float


def pack(out: Path, *options: str, control: Control | None = None, timeout: float = 110) -> Packed:
    env = {**os.environ, "PYTHONPATH": os.fspath(ROOT), **(control.env if control else {})}
    line = [sys.executable, "-m", "tests.gpu.pack", "--out", os.fspath(out), *options]
    begin = time.monotonic()
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=timeout)
    rows = json.loads((out / "gpu.json").read_text())["rows"] if (out / "gpu.json").exists() else []
    return Packed(done.returncode, done.stdout + done.stderr, {r["name"]: r for r in rows}, time.monotonic() - begin)


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    found = pack(tmp_path / "out")
    if "no GPU" not in found.output:
        pytest.skip("this machine has one")
    assert found.code == 0
    assert found.output.count("\n") == 1 and found.output.startswith("no GPU: ")
    assert not (tmp_path / "out").exists()


def test_what_is_asked_for_is_run(tmp_path: Path, control: Control) -> None:
    found = pack(tmp_path / "out", "--fake", "--only", "driver", "--only", "kernels", control=control)
    assert found.code == 0, found.output
    assert {name: row["result"] for name, row in found.rows.items()} == {
        "driver and device": "ok",
        "kernels loaded, checksum as on the host": "ok",
    }
    assert "granularity: 2048 KiB" in (tmp_path / "out/gpu.md").read_text()
    assert not (tmp_path / "out/failures.log").exists()
    wrong = pack(tmp_path / "other", "--fake", "--only", "no such", control=control)
    assert wrong.code == 2 and "no check has 'no such' in its name; the names are:" in wrong.output


@pytest.mark.slow
def test_a_call_that_never_returns_costs_its_own_row(tmp_path: Path, control: Control) -> None:
    control.set(stuck="cuMemImportFromShareableHandle")
    options = ("--only", "fresh process", "--only", "kernels", "--limit", "12")
    found = pack(tmp_path / "out", "--fake", *options, control=control)
    assert found.code == 1
    hung, next_one = found.rows.values()
    assert hung["result"] == "timed out" and next_one["result"] == "ok", found.output
    assert hung["seen"]["why"].startswith("hung in ftrun/native/cuda.py:") and "(attach)" in hung["seen"]["why"]
    assert "create, map and export" in hung["seen"], "what it saw before is in its row"
    log = (tmp_path / "out/failures.log").read_text()
    assert "in fresh_process" in log and "in attach" in log and "__do_sys_pause" in log


@pytest.mark.slow
def test_it_stops_within_its_budget_and_says_what_it_left_out(tmp_path: Path, control: Control) -> None:
    control.set(stuck="cuMemImportFromShareableHandle")  # so that the budget is gone early
    found = pack(tmp_path / "out", "--fake", "--budget", "30", control=control)
    assert found.seconds < 30 + 5, "beside what a busy machine takes to end the last process"
    assert "the same bits twice" in found.output.splitlines()[-1].partition("left out by BUDGET=30: ")[2]
    assert found.rows["the same bits twice"]["result"] == "left out"
    assert "go on with FROM='" in found.output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_check_that_the_fake_driver_can_serve_is_as_it_should_be(tmp_path: Path, control: Control) -> None:
    control.set(memory=2 << 30)
    found = pack(tmp_path / "out", "--fake", "--budget", "480", control=control, timeout=560)
    assert found.code == 0, found.output + (tmp_path / "out/failures.log").read_text()
    wanted = [check.name for check in CHECKS if check.needs is Needs.DRIVER]
    assert {name: found.rows[name]["result"] for name in wanted} == dict.fromkeys(wanted, "ok"), found.output


@pytest.mark.slow
def test_a_run_that_hangs_shows_its_board_and_the_stacks_of_its_workers(tmp_path: Path, control: Control) -> None:
    control.set(stuck="cuMemExportToShareableHandle")
    found = pack(tmp_path / "out", "--fake", "--only", "without a fault", "--limit", "30", control=control)
    (row,) = found.rows.values()
    assert row["result"] == "timed out" and "ftrun/native/cuda.py:" in row["seen"]["why"], found.output
    log = (tmp_path / "out/failures.log").read_text()
    assert "-- run " in log and "ftrun rank 0" in log and "in allocate" in log


def test_names_are_one_of_a_kind_and_pick_what_they_say() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert [check.name for check in chosen(["nccl"], "")] == [name for name in names if "nccl" in name.lower()]
    assert chosen([], "nccl")[0].name == "NCCL, aborted and made again" and chosen([], "nccl")[-1] == CHECKS[-1]
