"""Run the core tests on other releases of torch and Python, one environment at a time; keep the table in docs/versions.md.

    python tests/versions.py --python python3.12 --torch 2.15.0

Each environment is made empty in .venv-versions, gets that torch (a CUDA build of some GB where pip has no other) and the newest
of everything else, and is removed before the next. Exit code 1 when a test failed somewhere.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "versions.md"
ENVIRONMENT = ROOT / ".venv-versions"
BEGIN, END = "<!-- rows: make versions -->\n", "<!-- end of rows -->\n"
NEEDS = ("hypothesis", "prometheus-client", "pyte", "pytest", "pytest-timeout", "pytest-xdist")
# kills in every phase, once as tests and once as `ftrun verify`; the same of sharded models and pipelines; what a worker sees beside
# torchrun; a status; a pretended GPU; the script's variables: frames, copies, forty scripts, kills of some more; a loader's processes
CORE = (
    "tests/e2e/test_exact.py::test_what_is_compared_with_is_what_torchrun_gives[adamw]",
    "tests/e2e/test_exact.py::test_clean_run_equals_torchrun[adamw]",
    "tests/e2e/test_exact.py::test_ten_kills_in_one_run[adamw]",
    "tests/e2e/test_exact.py::test_ten_kills_in_one_run[across]",
    "tests/e2e/test_exact.py::test_step_0_in_every_phase",
    "tests/e2e/test_exact.py::test_two_at_once",
    "tests/e2e/test_exact.py::test_during_recovery[survivor-reset]",
    "tests/e2e/test_sharded.py::test_fsdp2_at_every_collective",
    "tests/e2e/test_sharded.py::test_hsdp_at_every_collective_at_gates_and_in_updates",
    "tests/e2e/test_sharded.py::test_a_shard_that_nobody_else_has_outlives_a_death_at_the_gate",
    "tests/e2e/test_sharded.py::test_a_death_in_the_update_goes_back_to_the_snapshot",
    "tests/e2e/test_sharded.py::test_more_at_every_collective[--layout tp]",
    "tests/e2e/test_sharded.py::test_more_at_every_collective[--layout fsdp-tp]",
    "tests/e2e/test_pipeline.py::test_deaths_in_every_phase_and_around_calls_change_nothing",
    "tests/e2e/test_pipeline.py::test_without_a_replica_a_stage_is_adopted_or_all_go_back",
    "tests/e2e/test_subgroups.py",
    "tests/e2e/test_verify.py::test_kills_in_every_phase_leave_no_trace",
    "tests/e2e/test_cuda_build.py",
    "tests/helpers/test_fork_server.py",
    "tests/cli/test_side_by_side.py::test_workers_see_the_same[usual]",
    "tests/view/test_status.py::test_healthy",
    "tests/view/test_status.py::test_recovering",
    "tests/worker/torch_compat/test_frames_private.py",
    "tests/worker/variables/test_copies.py",
    "tests/worker/variables/test_variables.py",
    "tests/worker/variables/test_shared_values.py",
    "tests/worker/variables/test_stopped_variables.py",
    "tests/worker/step/test_carried.py",
    "tests/worker/process/test_collected.py",
    "tests/worker/torch_compat/test_torch_private.py::test_every_name_is_there_and_behaves",
    "tests/cases/test_cases.py::test_case[replay-buffer]",
    "tests/cases/test_cases.py::test_case[epoch-meters]",
    "tests/cases/test_cases.py::test_case[trainer-state]",
    "tests/e2e/test_loader_processes.py::test_a_run_ends_as_without_ftrun[distributed]",
)
FACTS = "import json, platform, torch; print(json.dumps([torch.__version__, torch.version.cuda, platform.python_version()]))"


class Row(NamedTuple):
    """One line of the table."""

    torch: str
    cuda: str
    python: str
    passed: str
    failed: str
    skipped: str
    seconds: str
    date: str
    commit: str


def newest_first(row: Row) -> tuple[list[int], list[int]]:
    return _numbers(row.torch), _numbers(row.python)


def _numbers(version: str) -> list[int]:
    return [-int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def read_rows() -> list[Row]:
    """The rows of the committed table."""
    lines = TABLE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines[2:]]


def keep(row: Row) -> None:
    """Put a row into the table in place of the last one of the same releases."""
    rows = [old for old in read_rows() if (old.torch, old.python) != (row.torch, row.python)]
    lines = ["| " + " | ".join(cells) + " |\n" for cells in sorted([*rows, row], key=newest_first)]
    before, _, rest = TABLE.read_text().partition(BEGIN)
    head = [f"| {' | '.join(Row._fields)} |\n", "|---" * len(Row._fields) + "|\n"]
    TABLE.write_text(before + BEGIN + "".join(head + lines) + END + rest.partition(END)[2])


def install(python: str, torch: str) -> Path:
    """Make the environment; its interpreter.

    Raises:
        CalledProcessError
    """
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(ENVIRONMENT)], check=True)
    interpreter = ENVIRONMENT / "bin" / "python"
    # a machine's pip may be configured to hold torch back: no constraints but ours, which are none
    env = {**os.environ, "PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    pip = [str(interpreter), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"torch=={torch}", *NEEDS], env=env, check=True)
    subprocess.run([*pip, "--editable", str(ROOT)], env=env, check=True)
    return interpreter


def run_core(interpreter: Path, jobs: int) -> Row:
    """The core tests in that environment, as a row."""
    facts = subprocess.run([str(interpreter), "-c", FACTS], cwd=ENVIRONMENT, capture_output=True, text=True, check=True)
    torch, cuda, python = json.loads(facts.stdout)
    begin = time.monotonic()
    command = [str(interpreter), "-m", "pytest", "-q", "-m", "slow or not slow", f"--numprocesses={jobs}", *CORE]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)
    last = done.stdout.splitlines()[-1] if done.stdout else ""
    counts = {word: number for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
    failed = int(counts.get("failed", 0)) + int(counts.get("error", 0))
    if done.returncode and not failed:
        failed = 1  # pytest itself ended badly
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    status = ["git", "status", "--porcelain", "--untracked-files=no", "--", "ftrun", "native", "tests"]
    changes = subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True)
    return Row(
        torch=torch,
        cuda=cuda or "no",
        python=python,
        passed=counts.get("passed", "0"),
        failed=str(failed),
        skipped=counts.get("skipped", "0"),
        seconds=f"{time.monotonic() - begin:.0f}",
        date=dt.date.today().isoformat(),
        commit=head.stdout.strip() + (" and changes" if changes.stdout.strip() else ""),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the core tests on other releases of torch and Python.")
    parser.add_argument("--python", action="append", help="interpreters, the usual one first (default: this one)")
    parser.add_argument("--torch", action="append", required=True, help="releases of torch, the newest first")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    pythons = options.python or [sys.executable]
    # the newest torch on every Python, the others on the usual one
    cells = [(python, options.torch[0]) for python in pythons] + [(pythons[0], torch) for torch in options.torch[1:]]
    bad = 0
    for python, torch in cells:
        print(f"--- {python}, torch {torch}", flush=True)
        row = run_core(install(python, torch), options.jobs)
        keep(row)
        bad += int(row.failed)
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
