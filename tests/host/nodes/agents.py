"""Starts several launchers of one run on this machine, each with a runs folder and logs of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Run, wait_for

_DRIVER = """
import json, sys
sys.path.pop(0)
from ftrun.cli.main import _fail
from ftrun.core.errors import EXIT_FAILED, EXIT_USAGE, FtrunError, UsageError
from ftrun.host.run.launcher import launch, require_usable
from ftrun.host.base.settings import Nodes, Settings
raw = json.loads(sys.argv[1])
nodes = Nodes(**raw.pop("nodes"))
try:
    require_usable()
    code = launch(Settings(argv=tuple(raw.pop("argv")), nodes=nodes, **raw))
except UsageError as error:
    code = _fail(str(error), EXIT_USAGE)
except FtrunError as error:
    code = _fail(str(error), EXIT_FAILED)
sys.exit(code)
"""

# every rank adds its number to a sum and leaves its environment; `{body}` may do something first
SCRIPT = """
import faulthandler, json, os, sys, time
faulthandler.enable()
import torch, torch.distributed as dist
out = {out!r}
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def up(name):
    open(os.path.join(out, name), "w").close()
def wait(name, seconds=60):
    deadline = time.monotonic() + seconds
    while not os.path.exists(os.path.join(out, name)):
        if time.monotonic() > deadline: sys.exit("waited for " + name)
        time.sleep(0.01)
dist.init_process_group("gloo")
total = torch.tensor([float(rank)])
dist.all_reduce(total)
{body}
path = os.path.join(out, f"rank{{rank}}.json")
with open(path + ".tmp", "w") as file:
    json.dump({{"env": dict(os.environ), "sum": total.item(), "size": dist.get_world_size()}}, file)
os.replace(path + ".tmp", path)
dist.barrier()
dist.destroy_process_group()
"""


class Agents:
    """All launchers of one test."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.out = base / "out"
        self.out.mkdir()
        self.runs: list[Run] = []
        self.meeting = base / "meeting"
        self.meeting.mkdir(mode=0o700)

    def script(self, body: str = "") -> Path:
        path = self.base / "train.py"
        path.write_text(SCRIPT.format(out=str(self.out), body=body))
        return path

    def start(self, script: Path, nodes: dict[str, Any], **settings: Any) -> Run:
        """One more agent; `nodes` are fields of Nodes, `settings` those of Settings."""
        at = self.base / f"agent{len(self.runs)}"
        runs_root = at / "runs"
        runs_root.mkdir(mode=0o700, parents=True)
        env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        env["FTRUN_RUNS_ROOT"] = str(runs_root)
        env["PYTHONPATH"] = str(ROOT)
        env["GLOO_SOCKET_IFNAME"] = "lo"
        wanted = {
            "argv": [str(script)],
            "log_dir": str(at / "logs"),
            "run_id": "many",
            "nproc": 2,
            "spares": 0,
            **settings,
        }
        out, err = at / "stdout", at / "stderr"
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                [sys.executable, "-c", _DRIVER, json.dumps({**wanted, "nodes": nodes})],
                cwd=at,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                start_new_session=True,
            )
        run = Run(process, at, runs_root, out, err)
        self.runs.append(run)
        return run

    def wait(self, *codes: int) -> None:
        """Every agent ends, with these codes in the order of their start."""
        got = [run.wait() for run in self.runs]
        assert got == list(codes), "\n".join(f"--- agent {k}\n{r.stdout}\n{r.stderr}" for k, r in enumerate(self.runs))

    def wait_for(self, name: str) -> None:
        """Wait until a worker made the file `name`."""

        def there() -> bool:
            ended = [r.stderr for r in self.runs if r.process.poll() not in (None, -9)]
            assert (self.out / name).exists() or not ended, f"no {name}, and an agent ended:\n" + "\n".join(ended)
            return (self.out / name).exists()

        wait_for(there, name)

    def ranks(self) -> dict[int, dict[str, Any]]:
        """What each rank left."""
        found = {int(p.stem.removeprefix("rank")): json.loads(p.read_text()) for p in self.out.glob("rank*.json")}
        return dict(sorted(found.items()))

    def clean_up(self) -> None:
        from tests.conftest import processes_of

        for run in self.runs:
            if run.process.poll() is None:
                run.process.kill()
            run.process.wait()
        left = {}
        for run in self.runs:
            wait_left(run.runs_root)
            left.update(processes_of(run.runs_root))
        assert not left, f"processes left behind: {left}"


def wait_left(root: Path) -> None:
    import contextlib
    import signal
    import time

    from tests.conftest import processes_of

    deadline = time.monotonic() + 5.0
    while processes_of(root) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = processes_of(root)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left behind: {left}"


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    group = Agents(tmp_path)
    try:
        yield group
    finally:
        group.clean_up()
