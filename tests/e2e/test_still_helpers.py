"""ftrun's own processes that stand still, for good: each is killed, another one takes its place, and the run never waits long."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Ftrun, Run, wait_for
from tests.e2e import harness
from tests.e2e.conftest import Reference
from tests.e2e.test_services import SLOW, Live, begin

__all__ = ["begin"]

WAITS = """
import os, time
print("up", flush=True)
while not os.path.exists(GO):
    time.sleep(0.01)
"""
TITLES = {"fork server": "forksrv", "fd store": "fd store", "store": "store", "metrics": "metrics"}
PROMPT = 20.0  # seconds on a busy machine; a helper that is waited for is waited for without end


@pytest.fixture
def waiting(ftrun: Ftrun) -> Callable[..., Run]:
    """A run whose workers wait for a file "go"."""

    def start(*options: object) -> Run:
        script = ftrun.script(WAITS.replace("GO", repr(str(ftrun.base / "go"))))
        run = ftrun.start("--nproc-per-node", 2, *options, script)
        wait_for(lambda: run.stdout.count("up") >= 2, "the workers")
        return run

    return start


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "a stopped process")


@pytest.mark.parametrize("service", ["fork server", "fd store", "store"])
def test_sigterm_ends_a_run_whose_helper_stands_still(waiting: Callable[..., Run], service: str) -> None:
    run = waiting("--spares", 0)
    pid = run.pid(f"ftrun {TITLES[service]}")
    _stop(pid)
    begin = time.monotonic()
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM, run.stderr
    assert time.monotonic() - begin < PROMPT


def test_a_run_ends_whose_fork_server_stands_still(ftrun: Ftrun, waiting: Callable[..., Run]) -> None:
    """It reaps nobody. The exit code is that of the workers."""
    run = waiting("--spares", 1)
    pid = run.pid("ftrun forksrv")
    _stop(pid)
    begin = time.monotonic()
    (ftrun.base / "go").touch()
    assert run.wait() == 0, run.stderr
    assert time.monotonic() - begin < PROMPT


def test_each_that_stands_still_is_replaced_and_one_in_a_debugger_is_not(ftrun: Ftrun, waiting: Callable[..., Run]) -> None:
    run = waiting("--spares", 0, "--metrics-port", 0)
    pids = {name: run.pid(f"ftrun {title}") for name, title in TITLES.items()}
    with _traced(pids["store"]):
        for pid in pids.values():
            with contextlib.suppress(PermissionError):
                os.kill(pid, signal.SIGSTOP)
        others = {name: pid for name, pid in pids.items() if name != "store"}
        for name, pid in others.items():
            wait_for(lambda n=name: f"our {n} process died (a helper" in run.stderr, f"another {name}")
            new = wait_for(lambda n=name, p=pid: set(run.pids(f"ftrun {TITLES[n]}")) - {p}, f"the new {name}")
            assert len(new) == 1
            assert f"our {name} process (pid {pid}) stands still" in run.stderr
        assert "our store process" not in run.stderr, "a debugger holds it"
    (ftrun.base / "go").touch()
    assert run.wait() == 0, run.stderr


@contextlib.contextmanager
def _traced(pid: int) -> Iterator[None]:
    """A debugger that holds a process; it lets it go at the end."""
    code = (
        "import ctypes, os, sys\n"
        "libc, pid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])\n"
        "assert libc.ptrace(16, pid, None, None) == 0, os.strerror(ctypes.get_errno())\n"  # PTRACE_ATTACH
        "os.waitpid(pid, 0x40000000)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
        "libc.ptrace(17, pid, None, None)\n"  # PTRACE_DETACH
        "os.kill(pid, 18)\n"
    )
    command = [sys.executable, "-c", code, str(pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as debugger:
        assert debugger.stdin is not None and debugger.stdout is not None
        if debugger.stdout.readline() != b"held\n":
            pytest.skip("processes may not be traced here")
        yield
        debugger.stdin.close()


def test_a_launcher_that_stood_still_blames_nobody(ftrun: Ftrun, waiting: Callable[..., Run]) -> None:
    """Nor when everybody stood still with it, as in a frozen container."""
    run = waiting("--spares", 0)
    pids = [run.pid(f"ftrun {title}") for title in ("forksrv", "fd store", "store")]
    launcher = run.process.pid
    for pid in (launcher, *pids):
        _stop(pid)
    time.sleep(4.0)  # longer than it takes to find out
    for pid in (launcher, *pids):
        os.kill(pid, signal.SIGCONT)
    time.sleep(2.5)
    (ftrun.base / "go").touch()
    assert run.wait() == 0, run.stderr
    assert "stands still" not in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("service", "spares"), [("fork server", 0), ("store", 1), ("fd store", 1)])
def test_a_rank_dies_while_a_helper_stands_still(
    stock: Reference, begin: Callable[..., Live], service: str, spares: int
) -> None:
    live = begin(["--stretch", "0.2"], spares=spares)  # a helper that the repair does not need is missed after some seconds
    live.reach(2)
    _stop(live.pid(f"ftrun {TITLES[service]}"))
    live.kill("ftrun rank 2")
    live.said(f"our {service} process died")
    outcome = live.finish()
    harness.same(stock(), outcome)
    assert harness.replaced_ranks(outcome) == {2}


@pytest.mark.slow
def test_all_helpers_stand_still_at_once(stock: Reference, begin: Callable[..., Live]) -> None:
    live = begin(SLOW)
    live.reach(2)
    for title in ("forksrv", "fd store", "store"):
        _stop(live.pid(f"ftrun {title}"))
    live.kill("ftrun rank 1")
    outcome = live.finish()
    harness.same(stock(), outcome)
    assert {e["service"] for e in outcome.events("ServiceDied")} == {"fork server", "fd store", "store"}
