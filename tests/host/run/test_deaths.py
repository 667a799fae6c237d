"""Signals, and deaths of our own processes: nothing is ever left behind, and workers go on where they can."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import Ftrun, Run, processes_of, wait_for

# works until a file appears; a child of each worker shows that whole groups are ended
SCRIPT = """
import os, subprocess, sys, time
print("up", flush=True)
child = subprocess.Popen(["sleep", "300"])
while not os.path.exists({go!r}):
    time.sleep(0.01)
child.kill()
print("done", flush=True)
"""


class Scene:
    """Three workers that are up, each with a child."""

    def __init__(self, ftrun: Ftrun, *options: object) -> None:
        self.go = ftrun.base / "go"
        self.ftrun = ftrun
        self.run: Run = ftrun.start(
            "--nproc-per-node", 3, "--spares", 0, *options, ftrun.script(SCRIPT.format(go=str(self.go)))
        )
        self.run.wait_output("up", 3)
        wait_for(lambda: len(self.run.pids("sleep")) == 3, "the workers' children")

    def finish(self) -> int:
        self.go.touch()
        return self.run.wait()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signal_ends_everything(ftrun: Ftrun, signum: int) -> None:
    scene = Scene(ftrun)
    scene.run.signal(signum)
    assert scene.run.wait(15) == 128 + signum
    assert processes_of(ftrun.runs_root) == {}


def test_signal_while_the_fork_server_still_imports(ftrun: Ftrun) -> None:
    run = ftrun.start("--nproc-per-node", 2, ftrun.script("print('up')\n"))
    run.wait_output("ftrun: run ")
    run.signal(signal.SIGINT)
    assert run.wait(10) == 128 + signal.SIGINT


def test_launcher_killed_leaves_nobody(ftrun: Ftrun) -> None:
    scene = Scene(ftrun)
    os.kill(scene.run.process.pid, signal.SIGKILL)
    scene.run.wait()
    wait_for(lambda: not processes_of(ftrun.runs_root), "the end of every process", 5.0)
    assert list(ftrun.runs_root.iterdir()) == []
    assert scene.run.journal()[0]["config"]["nproc"] == 3, "the guardian keeps the journal"


def test_what_a_dead_launcher_and_fd_store_leave_is_removed_by_the_next_run(ftrun: Ftrun) -> None:
    scene = Scene(ftrun)
    fd_store = scene.run.pid("ftrun fd store")
    os.kill(scene.run.process.pid, signal.SIGSTOP)  # so that it cannot start another fd store
    os.kill(fd_store, signal.SIGKILL)
    os.kill(scene.run.process.pid, signal.SIGKILL)
    scene.run.wait()
    wait_for(lambda: not processes_of(ftrun.runs_root), "the end of every process", 10.0)
    assert list(ftrun.runs_root.glob("*/run.json"))
    assert ftrun.call("runs").stdout == ""
    assert ftrun.start("--spares", 0, ftrun.script("print('next')\n", "next.py")).wait() == 0
    assert not list(ftrun.runs_root.glob("*/run.json"))


@pytest.mark.parametrize(("name", "title"), [("fork server", "forksrv"), ("fd store", "fd store"), ("store", "store")])
def test_service_killed_is_replaced_and_workers_go_on(ftrun: Ftrun, name: str, title: str) -> None:
    scene = Scene(ftrun)
    old = scene.run.pid(f"ftrun {title}")
    os.kill(old, signal.SIGKILL)
    scene.run.wait_output(f"our {name} process died")
    wait_for(lambda: [p for p in scene.run.pids(f"ftrun {title}") if p != old], f"another {name}")
    assert scene.finish() == 0, scene.run.stderr
    assert scene.run.stdout.count("done") == 3


def test_exit_codes_are_known_after_the_fork_server_died(ftrun: Ftrun) -> None:
    scene = Scene(ftrun)
    os.kill(scene.run.pid("ftrun forksrv"), signal.SIGKILL)
    scene.run.wait_output("our fork server process died")
    os.kill(scene.run.pid("ftrun rank 1"), signal.SIGSEGV)
    assert scene.run.wait(30) == 1
    assert "rank 1 failed: SIGSEGV" in scene.run.stderr


def test_restart_needs_a_new_fork_server(ftrun: Ftrun) -> None:
    scene = Scene(ftrun, "--max-restarts", 1)
    os.kill(scene.run.pid("ftrun forksrv"), signal.SIGKILL)
    os.kill(scene.run.pid("ftrun rank 0"), signal.SIGKILL)
    scene.run.wait_output("up", 6)
    assert scene.finish() == 0, scene.run.stderr


def test_frozen_worker_is_found(ftrun: Ftrun) -> None:
    scene = Scene(ftrun)
    frozen = scene.run.pid("ftrun rank 2")
    os.kill(frozen, signal.SIGSTOP)
    began = time.monotonic()
    assert scene.run.wait(15) == 1
    assert "rank 2 failed: frozen" in scene.run.stderr
    assert time.monotonic() - began < 8
    died = [line["event"] for line in scene.run.journal() if line.get("event", {}).get("kind") == "Died"]
    assert died[0]["fault"] == "frozen" and "stopped by a signal" in died[0]["evidence"]
    assert not Path(f"/proc/{frozen}").exists()
