"""What checks of a real GPU share: whole runs, and programs of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e import harness
from tests.gpu import conftest, machine

# none is called as a package that torch may import (cuda, nccl): a script's folder comes first for every import
SCRIPTS = Path(__file__).resolve().parent / "scripts"
SETTINGS = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), os.fspath(machine.ROOT)])),
}
# what the protocol needs of NCCL, for groups that are not made by ftrun
NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0", "NCCL_NVLS_ENABLE": "0"}


def start(
    folder: Path,
    *arguments: str,
    script: str = "on_device.py",
    faults: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    ranks: int = conftest.RANKS,
    env: dict[str, str] | None = None,
) -> harness.Running:
    """Begin a run of one of the scripts. An interpreter that has torch may not have ftrun installed."""
    (folder / "out").mkdir(parents=True)
    given = ["--nproc-per-node", str(ranks), "--spares", "1", "--max-replacements", "50", *options]
    if faults:
        (folder / "plan.toml").write_text("seed = 1\n" + "".join(faults))
        given += ["--fault-plan", str(folder / "plan.toml")]
    line = [sys.executable, "-m", "ftrun", *given, str(SCRIPTS / script), "--out", str(folder / "out"), *arguments]
    return harness.start(folder, line, {**SETTINGS, **(env or {})})


def equal(one: conftest.Outcome, other: conftest.Outcome, ranks: int = conftest.RANKS) -> None:
    """As `conftest.same`, for any number of ranks."""
    for outcome in (one, other):
        assert outcome.code == 0 and len(outcome.ranks) == ranks, outcome.output[-4000:]
    for rank, (a, b) in enumerate(zip(one.ranks, other.ranks, strict=True)):
        assert [k for k in conftest.COMPARED if a.get(k) != b.get(k)] == [], f"rank {rank}\n{other.output[-4000:]}"


def total_ms(outcome: conftest.Outcome) -> str:
    """How long the run's repairs took."""
    incidents = [line for line in outcome.journal if line.get("note") == "incident"]
    return ", ".join(f"{incident['total_ms']:.0f}" for incident in incidents) + " ms"


def program(line: list[str], timeout: float, env: dict[str, str] | None = None, fds: tuple[int, ...] = ()) -> Any:
    """Run one of the scripts, or code after -c, by itself; what it printed last, as JSON."""
    done = subprocess.run(
        [sys.executable, *line],
        env={**os.environ, **SETTINGS, **(env or {})},
        pass_fds=fds,
        stdout=subprocess.PIPE,  # stderr is ours, so that the stacks of one that hangs come to the check's log
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"it ended with {done.returncode}\n{done.stdout[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def open_devices(pid: int) -> list[str]:
    """NVIDIA device files that a process has open."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("/dev/nvidia"):
            found.append(target)
    return found
