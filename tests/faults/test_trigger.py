"""Faults fired by real processes: how each ends, and that the count survives the process that fired."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftrun.faults.plan import load_plan
from ftrun.faults.trigger import Trigger, fired, unfired

PROGRAM = """
import sys
from pathlib import Path
from ftrun.faults.plan import load_plan
from ftrun.faults.trigger import Trigger
trigger = Trigger(load_plan(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
for step in range(3):
    for phase in ("forward", "backward", "gate", "update", "idle"):
        trigger.fire(phase, step, 0)
assert "torch" not in sys.modules
print("survived")
"""


def plan_file(tmp_path: Path, *faults: str) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text("".join(f"[[fault]]\n{f}\n" for f in faults))
    return path


def start(plan: Path, rank: int, run_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(plan), str(rank), str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(plan: Path, rank: int, run_dir: Path) -> tuple[int, str, str]:
    process = start(plan, rank, run_dir)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("kill", -signal.SIGKILL),
        ("term", -signal.SIGTERM),
        ("segv", -signal.SIGSEGV),
        ("abort", -signal.SIGABRT),
        ("exit:7", 7),
        ("exit:0", 0),
        ("exception", 1),
    ],
)
def test_kinds_that_end_the_process_fire_once(tmp_path: Path, kind: str, code: int) -> None:
    path = plan_file(tmp_path, f'kind = "{kind}"\nrank = 1\nstep = 1\nat = "gate"')
    plan = load_plan(path)
    assert [count for _, count in unfired(plan, tmp_path)] == [0]
    returncode, out, err = run(path, 1, tmp_path)
    assert (returncode, out) == (code, "")
    if kind == "exception":
        assert "RuntimeError: injected fault: exception on rank 1 in gate of step 1" in err
    (firing,) = fired(tmp_path)
    assert (firing.fault, firing.count, firing.rank, firing.step, firing.phase, firing.kind) == (
        0,
        1,
        1,
        1,
        "gate",
        kind.partition(":")[0],
    )
    assert unfired(plan, tmp_path) == []
    assert run(path, 1, tmp_path)[1] == "survived\n"
    assert len(fired(tmp_path)) == 1


def test_times_counts_over_processes(tmp_path: Path) -> None:
    path = plan_file(tmp_path, 'kind = "exit:5"\nrank = 0\nat = "update"\ntimes = 3')
    assert [run(path, 0, tmp_path)[0] for _ in range(4)] == [5, 5, 5, 0]
    assert [f.count for f in fired(tmp_path)] == [1, 2, 3]


def test_other_ranks_and_spares_do_not_fire(tmp_path: Path) -> None:
    path = plan_file(tmp_path, 'kind = "kill"\nrank = 1', 'kind = "kill"\nrank = 0\nstep = 9')
    assert run(path, 0, tmp_path)[1] == "survived\n"
    spare = Trigger(load_plan(path), None, tmp_path)
    spare.fire("forward", 0, 0)
    plan = load_plan(path)
    assert [(fault.rank, count) for fault, count in unfired(plan, tmp_path)] == [(1, 0), (0, 0)]


def test_a_claim_is_taken_once_by_many_racing_processes(tmp_path: Path) -> None:
    path = plan_file(tmp_path, 'kind = "exit:9"\nrank = 0\ntimes = 2')
    racing = [start(path, 0, tmp_path) for _ in range(8)]
    codes = sorted(p.wait(timeout=30) for p in racing)
    for process in racing:
        process.communicate()
    assert codes == [0] * 6 + [9, 9]
    assert sorted(p.name for p in (tmp_path / "faults").iterdir()) == ["0-1.json", "0-2.json"]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def cpu_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


@pytest.mark.parametrize("kind", ["freeze", "hang"])
def test_kinds_that_stop_the_process(tmp_path: Path, kind: str) -> None:
    path = plan_file(tmp_path, f'kind = "{kind}"\nrank = 0\nstep = 1\nat = "backward"')
    process = start(path, 0, tmp_path)
    try:
        deadline = time.monotonic() + 30
        while not (fired(tmp_path) and (kind == "hang" or state_of(process.pid) == "T")):
            assert time.monotonic() < deadline, "never fired"
            assert process.poll() is None
            time.sleep(0.005)
        if kind == "hang":
            ticks = cpu_ticks(process.pid)
            while cpu_ticks(process.pid) < ticks + 5:
                assert time.monotonic() < deadline, "hangs without using the processor"
                time.sleep(0.005)
            return
        os.kill(process.pid, signal.SIGCONT)
        assert process.communicate(timeout=30)[0] == "survived\n"
    finally:
        process.kill()
        process.communicate()


def test_slow_stretches_only_the_phases_in_which_the_rank_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    slept: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(time, "sleep", slept.append)
    trigger = Trigger(load_plan(plan_file(tmp_path, 'kind = "slow:3"\nrank = 0\nstep = 0')), 0, tmp_path)
    trigger.fire("forward", 0, 0)
    for phase, seconds in (("backward", 2.0), ("gate", 1.0), ("update", 5.0), ("idle", 0.5), ("forward", 4.0)):
        clock += seconds
        trigger.fire(phase, 0, 0)
    assert slept == [4.0, 2.0, 1.0]


def test_firings_are_plain_json(tmp_path: Path) -> None:
    path = plan_file(tmp_path, 'kind = "slow:2"\nrank = 0')
    Trigger(load_plan(path), 0, tmp_path).fire("forward", 4, 2)
    (file,) = (tmp_path / "faults").glob("*.json")
    raw = json.loads(file.read_text())
    assert (raw["step"], raw["attempt"], raw["pid"]) == (4, 2, os.getpid())
