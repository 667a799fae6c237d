"""The watcher of the devices as a process of a real run: counted, killed, wedged, and what a quarantine leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Ftrun, Run, wait_for
from tests.faults.fake_nvml import FakeNvml

SCRIPTS = Path(__file__).resolve().parents[2] / "e2e" / "scripts"
SCRIPT = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(SCRIPTS)!r})
from on_device import take_device
if sys.argv[1:] != ["cpu"]:
    take_device()
print("rank", os.environ["RANK"], "sees", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
while not Path("stop").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def nvml(ftrun: Ftrun) -> FakeNvml:
    ftrun.script(SCRIPT)
    return FakeNvml(ftrun.base, 3)


def start(ftrun: Ftrun, nvml: FakeNvml, *options: str, script: tuple[str, ...] = ("train.py",)) -> Run:
    """Two ranks, up and with a sample of the devices taken."""
    number = len(ftrun.runs)
    run = ftrun.start("--nproc-per-node=2", "--spares=0", f"--run-id=r{number}", *options, *script, **nvml.env)
    run.wait_output(" sees ", 2)
    wait_for(lambda: devices(run) and (script[-1] == "cpu" or len(ranks(run)) == 2), "devices.json")
    return run


def devices(run: Run) -> list[dict[str, object]]:
    path = run.dir / "devices.json"
    return list(json.loads(path.read_text())) if path.exists() else []


def ranks(run: Run) -> dict[object, object]:
    return {d["rank"]: d["uuid"] for d in devices(run) if d["rank"] is not None}


def end(ftrun: Ftrun, run: Run) -> None:
    (ftrun.base / "stop").touch()
    assert run.wait() == 0, run.stderr
    (ftrun.base / "stop").unlink()


@pytest.mark.slow
def test_a_quarantine_outlives_the_run(ftrun: Ftrun, nvml: FakeNvml) -> None:
    """The world starts again on the spare device; the next run does not get the bad one; a third has too few."""
    run = start(ftrun, nvml, "--quarantine-file=bad.json", "--max-restarts=1")
    nvml.xid(1, 48)
    run.wait_output(" sees ", 4)
    left = f"sees {nvml.uuids[0]},{nvml.uuids[2]}"
    assert run.stdout.count(left) == 2
    end(ftrun, run)
    again = start(ftrun, nvml, "--quarantine-file=bad.json")
    assert again.stdout.count(left) == 2
    end(ftrun, again)
    short = {**nvml.env, "CUDA_VISIBLE_DEVICES": "0,1"}
    none = ftrun.call("--nproc-per-node=2", "--quarantine-file=bad.json", "train.py", **short)
    assert none.returncode == 75
    assert "no healthy device is left" in none.stderr and nvml.uuids[1][:12] in none.stderr


@pytest.mark.slow
def test_a_watcher_that_is_killed_is_started_again(ftrun: Ftrun, nvml: FakeNvml) -> None:
    run = start(ftrun, nvml)
    first = run.pid("ftrun nvml")
    nvml.set(0, throttle=8 | 64, utilisation=97, temperature=88)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: run.pids("ftrun nvml") not in ([], [first]), "another watcher")
    wait_for(lambda: devices(run)[0]["temperature"] == 88, "a new sample")
    shown = devices(run)[0]
    assert (shown["throttle"], shown["utilisation"]) == (["hardware slowdown", "hardware thermal"], 97)
    nvml.xid(0, 43)
    run.wait_output("Xid 43 (GPU stopped a channel) on GPU 0")
    end(ftrun, run)


def test_a_foreign_xid_kills_no_rank_of_a_program_that_uses_no_gpu(ftrun: Ftrun, nvml: FakeNvml) -> None:
    run = start(ftrun, nvml, script=("train.py", "cpu"))
    nvml.xid(1, 13)
    run.wait_output("Xid 13")
    nvml.xid(1, 48)
    run.wait_output("Xid 48")
    end(ftrun, run)
    assert run.stdout.count(" sees ") == 2


def test_a_killed_launcher_leaves_no_watcher(ftrun: Ftrun, nvml: FakeNvml) -> None:
    run = start(ftrun, nvml)
    run.pid("ftrun nvml")
    run.signal(signal.SIGKILL)
    run.wait()
    wait_for(lambda: not run.pids("ftrun"), "no process")


def test_gpus_are_counted_by_nvml_where_there_are_no_device_files(ftrun: Ftrun, nvml: FakeNvml) -> None:
    done = ftrun.call("--dry-run", "--json", "--nproc-per-node=gpu", "train.py", **nvml.env)
    counted = json.loads(done.stdout)["settings"]["nproc"]
    assert counted == (3 if not Path("/dev/nvidia0").exists() else counted)


@pytest.mark.parametrize(("visible", "seen"), [(None, (2, 0)), ("1,2,0", (0, 1))])
def test_a_worker_on_each_of_the_gpus_that_are_named(
    ftrun: Ftrun, nvml: FakeNvml, visible: str | None, seen: tuple[int, ...]
) -> None:
    """The numbers are torch's: with CUDA_VISIBLE_DEVICES they count its entries."""
    env = {**nvml.env, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
    run = ftrun.start("--nproc-per-node=gpu:2,0", "--spares=0", "train.py", **env)
    run.wait_output(" sees ", 2)
    wait_for(lambda: len(ranks(run)) == 2, "devices.json")
    assert ranks(run) == {rank: nvml.uuids[number] for rank, number in enumerate(seen)}
    assert {line.rpartition(" ")[2] for line in run.stdout.splitlines()} <= {
        ",".join(nvml.uuids[number] for number in seen),
        ",".join(str(number) for number in seen),
    }
    end(ftrun, run)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("gpu:0,3", "there is no GPU 3; this machine shows 3 GPUs, 0 to 2"),
        ("gpu:1,1", "names a GPU twice; each worker has one of its own"),
        ("gpu:", "write the numbers of the GPUs, as in gpu:0,2"),
        ("gpu:1,a", "write the numbers of the GPUs, as in gpu:0,2"),
    ],
)
def test_gpus_that_cannot_be_named(ftrun: Ftrun, nvml: FakeNvml, value: str, what: str) -> None:
    done = ftrun.call(f"--nproc-per-node={value}", "train.py", **nvml.env)
    assert done.returncode == 2
    if not Path("/dev/nvidia0").exists() or "no GPU" not in what:
        assert f"--nproc-per-node {value}" in done.stderr and what in done.stderr


def test_the_launcher_does_not_import_pynvml() -> None:
    program = "import sys, ftrun.host.run.launcher; print('pynvml' in sys.modules, 'filelock' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_without_gpus_there_is_no_watcher(ftrun: Ftrun) -> None:
    ftrun.script('print("up", flush=True)')
    run = ftrun.start("--spares=0", "train.py", CUDA_VISIBLE_DEVICES="")
    assert run.wait() == 0
    assert not [line for line in run.journal() if line.get("note") in ("devices", "watcher-exit")]


@pytest.mark.slow
def test_a_driver_that_does_not_start_does_not_hold_up_the_run(ftrun: Ftrun, nvml: FakeNvml) -> None:
    """With something in quarantine the start waits for the devices' names, but not for ever."""
    (ftrun.base / "bad.json").write_text('{"GPU-x": {"reason": "old"}}')
    env = {**nvml.env, "FTRUN_FAKE_NVML_WEDGED_INIT": "1"}
    run = ftrun.start("--nproc-per-node=2", "--spares=0", "--quarantine-file=bad.json", "train.py", **env)
    run.wait_output(" sees ", 2)
    assert "does not return from nvmlInit" in run.stderr
    assert "starting without watching them" in run.stderr
    end(ftrun, run)


def test_a_broken_quarantine_file_is_refused_before_anything_starts(ftrun: Ftrun, nvml: FakeNvml) -> None:
    (ftrun.base / "bad.json").write_text("{")
    done = ftrun.call("--quarantine-file=bad.json", "train.py", **nvml.env)
    assert done.returncode == 78
    assert "bad.json:1: not JSON" in done.stderr
