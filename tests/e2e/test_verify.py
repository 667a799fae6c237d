"""`ftrun verify` as a person runs it: what it finds equal, what it finds different, and why; nothing is left when it is ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests import injected
from tests.e2e import harness
from tests.e2e.harness import REFERENCE, SCRIPTS, fault, kill

COMPARED = str(SCRIPTS / "compared.py")
BACKWARD = kill(1, "backward", 4)


def verify(
    folder: Path, *args: str, env: dict[str, str] | None = None, seconds: float = 90
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [harness.tool("ftrun"), "verify", *args],
        cwd=folder,
        env=harness.environment(folder, env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def small(folder: Path, *args: str, plan: str = BACKWARD) -> subprocess.CompletedProcess[str]:
    """The small script with two ranks and one planned fault."""
    (folder / "plan.toml").write_text(plan)
    return verify(folder, "--faults", "plan.toml", "--nproc-per-node", "2", COMPARED, *args)


@pytest.mark.slow
def test_kills_in_every_phase_leave_no_trace(folder: Path) -> None:
    done = verify(
        folder,
        "--kill-every-phase",
        "--nproc-per-node",
        "4",
        "--json",
        str(REFERENCE),
        "--out",
        str(folder / "${verify}"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["verdict"] == "equal" and result["difference"] is None and not result["passing_differences"]
    # a kill in a recovery that comes too late for its step is tried again in a further run
    assert result["faults"]["unfired"] == [] and result["faults"]["planned"] == result["faults"]["fired"] >= 11
    assert (result["ranks"], result["steps"], result["random_streams_per_rank"]) == (4, 12, 3)
    assert [run["name"] for run in result["runs"]][:2] == ["clean", "faults"]
    # what verify says is so: the script's own digests of both runs
    own = [
        [json.loads((folder / name / f"rank-{r}.json").read_text()) for r in range(4)] for name in ("clean", "faults")
    ]
    assert [[rank.get(key) for key in harness.COMPARED] for rank in own[0]] == [
        [rank.get(key) for key in harness.COMPARED] for rank in own[1]
    ]


def broken(folder: Path, part: str, *args: str) -> dict[str, Any]:
    """What is found when one part of the recovery is left out on purpose."""
    command = ("--kill-every-phase", "--nproc-per-node", "4", "--json", str(REFERENCE), *args)
    done = verify(folder, *command, "--out", str(folder / "${verify}"), env=injected.env(without=part))
    assert done.returncode == 1, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.slow
def test_another_order_of_summation_is_found(folder: Path) -> None:
    result = broken(folder, "prime")
    assert result["verdict"] == "different" and result["cause"] == "bucket-order", result["difference"]
    assert [run["name"] for run in result["runs"]] == ["clean", "faults", "again"]
    first = result["difference"]
    assert first["first"].startswith("gradient:") and first["point"] == "gate"
    assert 0 < first["differ_at_end"] <= first["compared_at_end"]


@pytest.mark.slow
def test_random_numbers_not_put_back_are_found(folder: Path) -> None:
    result = broken(folder, "rng")
    assert result["verdict"] == "different" and result["cause"] == "rng"
    assert result["difference"]["first"].startswith("random:")


@pytest.mark.slow
def test_a_loader_that_went_on_is_found(folder: Path) -> None:
    result = broken(folder, "batch", "--data", "loader")
    assert result["cause"] == "loader-position"
    assert result["difference"]["first"] == "batch:loader"


@pytest.mark.slow
def test_input_from_outside_is_found(folder: Path) -> None:
    done = small(folder, "--flaw", "outside")
    assert done.returncode == 1, done.stderr
    first, cause, *_ = done.stdout.splitlines()
    # the survivor does step 4 again with a counter that went on
    assert first.startswith("different: first in step 4 (done again after a fault): output of model 0 on rank")
    assert cause.startswith("likely cause: input that ftrun does not keep in place")


@pytest.mark.slow
def test_chance_is_not_blamed_on_recovery(folder: Path) -> None:
    done = small(folder, "--flaw", "chance")
    assert done.returncode == 1, done.stderr
    first, cause, advice, *_ = done.stdout.splitlines()
    assert re.match(
        r"not deterministic: two runs without faults differ first in step 3: gradient of .* before the sum", first
    )
    assert cause.startswith("likely cause: a non-deterministic operation")
    assert "twice" in advice


@pytest.mark.parametrize(
    ("flaw", "code", "said"),
    [
        ("unprotected", 2, "never called ftrun.protect"),
        pytest.param("exit", 2, "ranks 0 and 1 of the run clean did not reach the end", marks=pytest.mark.slow),
        pytest.param("checkpoint", 2, "began with step 6, the clean one with step 0", marks=pytest.mark.slow),
    ],
)
def test_scripts_that_cannot_be_compared(folder: Path, flaw: str, code: int, said: str) -> None:
    done = small(folder, "--flaw", flaw)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_checkpoint_kept_apart_is_no_obstacle(folder: Path) -> None:
    done = small(folder, "--flaw", "checkpoint", "--out", "${verify}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith(
        "equal: 2 ranks, 8 steps; 27 tensors and 3 random streams of each rank"
    )


@pytest.mark.slow
def test_a_plan_that_never_fires_verifies_nothing(folder: Path) -> None:
    done = small(folder, plan=kill(1, "backward", 400))
    assert (done.returncode, done.stdout) == (78, "")
    assert "no fault of the plan fired, so nothing was verified; the steps are 0 to 7" in done.stderr


@pytest.mark.slow
def test_a_run_that_faults_end_is_a_failure(folder: Path) -> None:
    done = small(folder, plan=fault("kill", 1, "forward", times=9))
    assert done.returncode == 1
    assert (
        done.stdout.splitlines()[0] == "failed: the run faults ended with exit code 75, the one without faults did not"
    )
    assert "died too often" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_it_is_ended(folder: Path, signum: signal.Signals) -> None:
    (folder / "plan.toml").write_text(BACKWARD)
    command = [
        harness.tool("ftrun"),
        "verify",
        "--faults",
        "plan.toml",
        "--nproc-per-node",
        "2",
        "--shutdown-timeout",
        "1",
        COMPARED,
    ]
    running = harness.start(folder, [*command, "--flaw", "wait"])
    deadline = time.monotonic() + 30
    while not (folder / "waiting").exists():
        assert running.process.poll() is None and time.monotonic() < deadline, running.output
        time.sleep(0.02)
    os.kill(running.process.pid, signum)
    code = running.wait(30)
    assert code == (130 if signum == signal.SIGINT else -9), running.output
    if signum == signal.SIGINT:
        assert running.output.splitlines()[-1] == "ftrun: verify: ended by a signal; nothing was compared"
    harness.check_no_strays(folder)
