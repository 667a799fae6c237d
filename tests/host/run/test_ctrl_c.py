"""A signal ends a run soon, wherever its ranks are, and each of them unwinds as under torchrun: handlers, `except`, `finally`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import Ftrun, Run
from tests.host import direct

RANKS = 3
PATIENCE = 60.0  # seconds that the launcher would leave to ranks which nobody lets go

# rank 0 sleeps where the signal wakes it; the others wait for its part in a collective, in C++, where Python hears nothing
SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist, ftrun
from torch.nn.parallel import DistributedDataParallel
mode, rank = {mode!r}, os.environ["RANK"]

def write(what):
    print(what, flush=True)
    open({base!r} + f"/{{what}}-{{rank}}", "w").close()

def handler(signum, frame):
    sys.exit(7)

def sleep():
    write("waiting")
    if rank == "0":
        time.sleep(100)

def call():
    sleep()
    dist.all_reduce(torch.ones(1))

if {signum} == signal.SIGTERM:
    signal.signal(signal.SIGTERM, handler)
if mode == "start":
    sleep()
try:
    dist.init_process_group("ftrun")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = ftrun.protect(model=model, optimizer=optimizer)
    for step in job.steps(6):
        if mode == "call" and step.index == 4:
            job.call(call)
        with step:
            if mode in ("step", "barrier") and step.index == 4 or mode == "repair" and step.index == 4 and not step.attempt:
                sleep()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    call()
except KeyboardInterrupt:
    write("interrupted")
    raise
except SystemExit:
    write("interrupted")
    raise
finally:
    if mode == "barrier":
        try:
            dist.barrier()
        except Exception:
            write("refused")
    write("finally")
"""


def begin(ftrun: Ftrun, mode: str, signum: signal.Signals = signal.SIGINT) -> Run:
    script = ftrun.script(SCRIPT.format(mode=mode, signum=int(signum), base=str(ftrun.base)))
    return direct.start(ftrun, script, RANKS, shutdown_timeout=PATIENCE)


def wrote(base: Path, what: str) -> set[int]:
    return {int(path.name.rpartition("-")[2]) for path in base.glob(f"{what}-*")}


def ends(run: Run, signum: signal.Signals) -> None:
    """Soon, for the reason that it was given, and nobody had to be killed."""
    began = time.monotonic()
    assert run.wait(PATIENCE / 2) == 128 + signum, run.stderr
    assert time.monotonic() - began < PATIENCE / 3, run.stderr
    assert "did not end within" not in run.stderr and "root cause" not in run.stderr, run.stderr


@pytest.mark.parametrize(
    ("mode", "signum"),
    [
        ("step", signal.SIGINT),
        ("step", signal.SIGTERM),
        pytest.param("call", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("call", signal.SIGTERM, marks=pytest.mark.slow),
        ("after", signal.SIGINT),
        pytest.param("after", signal.SIGTERM, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_signal_is_heard_by_ranks_that_wait_for_one_which_left(ftrun: Ftrun, mode: str, signum: signal.Signals) -> None:
    run = begin(ftrun, mode, signum)
    run.wait_output("waiting", RANKS)
    run.signal(signum)
    ends(run, signum)
    assert wrote(ftrun.base, "interrupted") == wrote(ftrun.base, "finally") == set(range(RANKS)), run.stderr


def test_ranks_that_meet_once_more_in_a_finally_are_not_left_waiting(ftrun: Ftrun) -> None:
    """The one that was interrupted first waits there for others, which wait for it in the step."""
    run = begin(ftrun, "barrier")
    run.wait_output("waiting", RANKS)
    run.signal(signal.SIGINT)
    ends(run, signal.SIGINT)
    assert wrote(ftrun.base, "interrupted") == wrote(ftrun.base, "finally") == set(range(RANKS)), run.stderr


@pytest.mark.parametrize("moment", ["stopping", pytest.param("takes over", marks=pytest.mark.slow)])
def test_a_signal_in_a_repair(ftrun: Ftrun, moment: str) -> None:
    run = begin(ftrun, "repair")
    run.wait_output("waiting", RANKS)
    os.kill(run.pid("ftrun rank 1"), signal.SIGKILL)
    run.wait_output(moment)
    run.signal(signal.SIGINT)
    ends(run, signal.SIGINT)
    assert wrote(ftrun.base, "interrupted") == wrote(ftrun.base, "finally") >= {0, 2}, run.stderr


@pytest.mark.slow
def test_a_signal_while_ranks_wait_for_one_that_makes_no_group(ftrun: Ftrun) -> None:
    run = begin(ftrun, "start")
    run.wait_output("waiting", RANKS)
    run.signal(signal.SIGINT)
    ends(run, signal.SIGINT)
    assert wrote(ftrun.base, "finally") == {1, 2}, run.stderr


FINISHES = """
import signal, torch, torch.distributed as dist, ftrun, time
from torch.nn.parallel import DistributedDataParallel
told = torch.zeros(1)
signal.signal(signal.SIGTERM, lambda *_: told.fill_(1))
dist.init_process_group("ftrun")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(model=model, optimizer=optimizer, ignore=[told])
for step in job.steps(10_000):
    with step:
        stop = told.clone()
        model(torch.ones(2, 4)).sum().backward()
        time.sleep(0.2 * dist.get_rank())
        dist.all_reduce(stop)
        optimizer.step()
        optimizer.zero_grad()
    if step.index == 2:
        print("up", flush=True)
    if stop:
        open({base!r} + f"/finally-{{dist.get_rank()}}", "w").write(str(step.index))
        break
"""


def test_a_step_that_the_script_wants_to_finish_is_finished(ftrun: Ftrun) -> None:
    """Nobody has left, so nobody is let go: the ranks agree on their last step in a collective, and it counts."""
    run = direct.start(ftrun, ftrun.script(FINISHES.format(base=str(ftrun.base))), RANKS)
    run.wait_output("up", RANKS)
    run.signal(signal.SIGTERM)
    ends(run, signal.SIGTERM)
    assert wrote(ftrun.base, "finally") == set(range(RANKS)), run.stderr
    assert len({path.read_text() for path in ftrun.base.glob("finally-*")}) == 1
