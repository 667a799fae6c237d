"""What a person reads after a run that failed: the root cause first, each traceback once, and what ftrun did."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from ftrun.host.workers import fence
from tests.conftest import Ftrun, Run, wait_for
from tests.host import direct

CLOCK = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"


def report(run: Run) -> list[str]:
    """The lines from the root cause on, without ftrun's prefix."""
    lines = run.stderr.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("ftrun: root cause: "))
    return [line.removeprefix("ftrun: ") for line in lines[at:]]


def failure(run: Run) -> dict[str, Any]:
    return next(line for line in run.journal() if line.get("note") == "failure")


def error_files(ftrun: Ftrun) -> dict[str, dict[str, Any]]:
    found = (ftrun.base / "logs").glob("*/attempt_*/*/error.json")
    return {f"{p.parent.parent.name}/{p.parent.name}": json.loads(p.read_text())["message"] for p in found}


THROWS = """
import os, time
def work(n):
    return n + "x"
if os.environ["RANK"] == "1":
    work(3)
time.sleep(60)
"""


def test_one_rank_throws(ftrun: Ftrun) -> None:
    script = ftrun.script(THROWS)
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, "--run-id", "thrown", script)
    assert run.wait() == 1
    lines = report(run)
    assert re.fullmatch(rf"root cause: rank 1 raised TypeError at {script}:4, {CLOCK}", lines[0])
    assert lines[1].startswith("  TypeError: unsupported operand") and lines[1].endswith("(traceback above)")
    assert re.fullmatch(r"  at start-up: [\d.]+ m?s after it began", lines[2])
    assert re.fullmatch(r"  local_rank 1, host \S+, pid \d+, exit code 1", lines[3])
    assert lines[4] == f"  log: {ftrun.base}/logs/thrown/attempt_0/1/{{error.json,stderr.log}}"
    assert lines[5] == "  ftrun did not retry: no restart is allowed (--max-restarts 0)"
    assert lines[6:] == ["no failure: rank 0 ended by ftrun (SIGTERM)"]
    assert run.stderr.count("Traceback (most recent call last)") == 1
    assert "runpy" not in run.stderr and "ftrun/worker" not in run.stderr, "only frames of the script"
    facts = failure(run)
    assert facts["root"]["rank"] == 1 and facts["root"]["early"] == "at start-up" and facts["stopped"] == [0]
    (where, record), *more = error_files(ftrun).items()
    assert where == "attempt_0/1" and not more
    assert record["message"].startswith("TypeError: unsupported operand")
    assert record["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last):\n")
    assert record["extraInfo"]["timestamp"].isdigit()


def test_an_exception_forges_no_line_of_ours(ftrun: Ftrun) -> None:
    script = ftrun.script("raise ValueError('x\\rftrun: one\\x1b[2J\\x1b[1A\\nftrun: two\\x9b')")
    run = ftrun.start("--nproc-per-node", 1, "--spares", 0, script)
    assert run.wait() == 1
    assert "\x1b" not in run.stderr and "\x9b" not in run.stderr
    lines = run.stderr.replace("\r", "\n").split("\n")
    assert all(line.startswith(("ftrun: ", "[rank 0] ")) for line in lines if line)
    assert not any(line.startswith(("ftrun: one", "ftrun: two")) for line in lines)
    assert "  ValueError: x\\rftrun: one\\u001b[2J\\u001b[1A (traceback above)" in report(run)


def test_all_ranks_throw_the_same(ftrun: Ftrun) -> None:
    # they wait for each other, so that all of them are on their way down before the first one is seen
    script = ftrun.script(
        "import os, time\n"
        f"base = {str(ftrun.base)!r}\n"
        "open(base + '/at-' + os.environ['RANK'], 'w').close()\n"
        "while not all(os.path.exists(f'{base}/at-{r}') for r in range(3)): time.sleep(0.001)\n"
        "raise ValueError('no such luck')\n"
    )
    run = ftrun.start("--nproc-per-node", 3, "--spares", 0, script)
    assert run.wait() == 1
    assert run.stderr.count("Traceback (most recent call last)") == 1
    lines = report(run)
    root = failure(run)["root"]["rank"]
    a, b = sorted({0, 1, 2} - {root})
    assert f"  ranks {a}, {b} failed in the same way" in lines
    assert not any(line.startswith(("no failure", "also failed")) for line in lines)
    assert run.stderr.count("(with the same traceback as rank") == 2
    assert sorted(error_files(ftrun)) == ["attempt_0/0", "attempt_0/1", "attempt_0/2"]


def test_record_keeps_its_own_error_file(ftrun: Ftrun) -> None:
    script = ftrun.script(
        "import os, time\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n"
        "    if os.environ['RANK'] == '0': raise KeyError('recorded')\n"
        "    time.sleep(60)\n"
        "main()\n"
    )
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, script)
    assert run.wait() == 1
    assert report(run)[0].startswith(f"root cause: rank 0 raised KeyError at {script}:5, ")
    record = error_files(ftrun)["attempt_0/0"]
    assert record["message"] == "KeyError: 'recorded'"
    assert "multiprocessing/errors/__init__.py" in record["extraInfo"]["py_callstack"], "as @record wrote it"
    assert "in <module>" not in record["extraInfo"]["py_callstack"]


@pytest.mark.parametrize(
    ("end", "headline", "ended"),
    [
        ("import sys; sys.exit(3)", "left with exit code 3", "exit code 3"),
        ("os.abort()", "died of SIGABRT", "signal SIGABRT (exit code 134)"),
        ("os.kill(os.getpid(), 9)", "died of SIGKILL", "signal SIGKILL (exit code 137)"),
    ],
)
def test_ends_without_an_exception(ftrun: Ftrun, end: str, headline: str, ended: str) -> None:
    script = ftrun.script(f"import os, time\nif os.environ['RANK'] == '0': {end}\ntime.sleep(60)\n")
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, script)
    assert run.wait() == 1
    lines = report(run)
    assert re.fullmatch(rf"root cause: rank 0 {headline}, {CLOCK}", lines[0])
    assert any(line.endswith(ended) for line in lines), lines
    assert lines[-1] == "no failure: rank 1 ended by ftrun (SIGTERM)"
    assert error_files(ftrun) == {}


PEER = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
try:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        raise LookupError("the cause")
    dist.all_reduce(torch.ones(1))
finally:
    dist.destroy_process_group()
"""


def test_a_rank_that_only_lost_its_peer_is_not_the_cause(ftrun: Ftrun) -> None:
    script = ftrun.script(PEER)
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, script)
    assert run.wait() == 1
    lines = report(run)
    assert lines[0].startswith(f"root cause: rank 1 raised LookupError at {script}:8, "), run.stderr
    assert not any(line.startswith("also failed") for line in lines)
    last = lines[-1]
    assert last.startswith(("rank 0 failed only because of it: RuntimeError: ", "no failure: rank 0 "))


BEREFT = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("here", flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if dist.get_rank() == 1:
        while not os.path.exists("go"): time.sleep(0.001)
        sys.exit(7)
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("restarts", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_cause_is_told_first_also_when_both_are_learnt_of_at_once(ftrun: Ftrun, restarts: int) -> None:
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, "--max-restarts", restarts, ftrun.script(BEREFT))
    run.wait_output("here", 2)
    fork_server, *ranks = (run.pid(f"ftrun {name}") for name in ("forksrv", "rank 0", "rank 1"))
    os.kill(fork_server, signal.SIGSTOP)  # it reaps rank 0 first, whoever died first
    (ftrun.base / "go").touch()
    wait_for(lambda: all(fence.ended(pid) for pid in ranks), "both ranks to die")
    os.kill(fork_server, signal.SIGCONT)
    assert run.wait() == 1 - restarts, run.stderr
    if restarts:
        assert "ftrun: rank 1 failed (exit 7); all workers start again" in run.stderr
    else:
        lines = report(run)
        assert lines[0].startswith("root cause: rank 1 left with exit code 7, "), run.stderr
        assert lines[-1].startswith("rank 0 failed only because of it: RuntimeError: "), run.stderr


TWO = """
import os, time
def wait_for(name):
    while not os.path.exists(name): time.sleep(0.001)
print("here", flush=True)
if os.environ["RANK"] == "1":
    wait_for("go")
    open("first", "w").close()
    raise ValueError("the first")
wait_for("first")
time.sleep(0.02)
os._exit(9)
"""


def test_two_failures_of_their_own(ftrun: Ftrun) -> None:
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, ftrun.script(TWO))
    run.wait_output("here", 2)
    ranks = [run.pid("ftrun rank 0"), run.pid("ftrun rank 1")]
    run.signal(signal.SIGSTOP)  # or it would end the second one before its own failure
    (ftrun.base / "go").touch()
    wait_for(lambda: all(fence.ended(pid) for pid in ranks), "both ranks to die")
    run.signal(signal.SIGCONT)
    assert run.wait() == 1
    lines = report(run)
    assert lines[0].startswith("root cause: rank 1 raised ValueError")
    assert any(re.fullmatch(rf"also failed: rank 0 left with exit code 9, {CLOCK}", line) for line in lines), lines


def test_failures_at_import_are_retried_exactly_as_often_as_asked(ftrun: Ftrun) -> None:
    ftrun.script("import absent_module_of_the_test\n", "needs.py")
    script = ftrun.script("print('try', flush=True)\nimport needs\n")
    run = ftrun.start("--nproc-per-node", 1, "--spares", 0, "--max-restarts", 3, script)
    assert run.wait() == 1
    assert run.stdout.count("try") == 4
    assert "all workers start again, attempt 2 of 4; it failed at start-up (" in run.stderr
    assert "all workers start again, attempt 3 of 4, after a pause of 0.5 s; it failed at start-up (" in run.stderr
    assert "all workers start again, attempt 4 of 4, after a pause of 1 s; it failed at start-up (" in run.stderr
    assert "  ftrun started all workers again 3 times, then gave up: no restart is left (--max-restarts 3)" in report(
        run
    )
    journal = run.journal()
    deaths = [line for line in journal if line.get("event", {}).get("kind") == "Died"]
    assert [d["event"]["early"] for d in deaths] == ["at start-up"] * 4
    pauses = [late["t"] - early["t"] for early, late in itertools.pairwise(deaths)]
    assert pauses[1] >= 0.5 and pauses[2] >= 1.0
    assert sorted(error_files(ftrun)) == [f"attempt_{n}/0" for n in range(4)]


@pytest.mark.slow
def test_start_that_succeeds_after_some_failures(ftrun: Ftrun) -> None:
    script = ftrun.script(
        "import os\nif int(os.environ['TORCHELASTIC_RESTART_COUNT']) < 2: import absent_module_of_the_test\nprint('up')\n"
    )
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, "--max-restarts", 2, script)
    assert run.wait() == 0, run.stderr
    assert run.stdout.count("up") == 2
    assert "root cause" not in run.stderr


def test_a_worker_that_never_came_up(ftrun: Ftrun) -> None:
    folder = ftrun.base / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import os\nif 'FTRUN_SPEC' in os.environ: os._exit(9)\n")
    path = f"{folder}:{ftrun.env['PYTHONPATH']}"
    script = ftrun.script("print('up')\n")
    run = ftrun.start("--spares", 0, "--worker-start", "exec", script, PYTHONPATH=path)
    assert run.wait() == 1
    assert "rank 0 failed: exit 9, before its script's first line (" in run.stderr
    lines = report(run)
    assert re.fullmatch(rf"root cause: rank 0 left with exit code 9, {CLOCK}", lines[0])
    assert lines[1].startswith("  it never came up: it died before its script's first line, ")
    assert failure(run)["root"]["early"] == "before its script"


IN_BODY = """
import torch, torch.distributed as dist, ftrun
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("ftrun")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(model=model, optimizer=opt)
for step in job.steps(5):
    with step:
        if step.index == 2 and job.rank == 1:
            raise ArithmeticError("again and again")
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
"""


def test_an_exception_that_a_retry_did_not_cure(ftrun: Ftrun) -> None:
    script = ftrun.script(IN_BODY)
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, script)
    assert run.wait() == 1
    lines = report(run)
    assert lines[0].startswith(f"root cause: rank 1 raised ArithmeticError at {script}:11, "), run.stderr
    assert "  ftrun had every rank do the step again, then gave up: the same exception came a second time" in lines
    assert any(re.fullmatch(r"  local_rank 1, host .*, pid \d+, ended by ftrun after that \(SIGTERM\)", line) for line in lines)
    assert lines[-1] == "no failure: rank 0 ended by ftrun (SIGTERM)"
    assert run.stderr.count("Traceback (most recent call last)") == 1, "the second time it is the same"
    assert error_files(ftrun)["attempt_0/1"]["message"] == "ArithmeticError: again and again"


def test_a_signal_is_no_failure(ftrun: Ftrun) -> None:
    run = direct.start(ftrun, ftrun.script("import time\nprint('up', flush=True)\ntime.sleep(60)\n"))
    run.wait_output("up", 2)
    run.signal(15)
    assert run.wait() == 143
    assert "root cause" not in run.stderr
    assert not [line for line in run.journal() if line.get("note") == "failure"]


def test_relative_paths(tmp_path: Path, ftrun: Ftrun) -> None:
    """The error file's variable is absolute, whatever --log-dir says: a script may change its directory."""
    script = ftrun.script("import os\nos.chdir('/')\nraise RuntimeError(os.environ['TORCHELASTIC_ERROR_FILE'])\n")
    run = ftrun.start("--spares", 0, "--log-dir", "here", "--run-id", "r", script, logs=False)
    assert run.wait() == 1
    path = ftrun.base / "here" / "r" / "attempt_0" / "0" / "error.json"
    assert json.loads(path.read_text())["message"]["message"] == f"RuntimeError: {path}"


def test_an_exception_that_cannot_say_what_it_is(ftrun: Ftrun) -> None:
    script = ftrun.script("class Odd(Exception):\n    def __str__(self): return self.nothing\nraise Odd\n")
    run = ftrun.start("--nproc-per-node", 1, "--spares", 0, script)
    assert run.wait() == 1
    assert report(run)[0].startswith(f"root cause: rank 0 raised Odd at {script}:3, "), run.stderr
    assert "ftrun: rank 0: Odd: <its text could not be had: AttributeError>" in run.stderr
    assert "ftrun/worker" not in run.stderr, "our own code did not fail over it"


def test_an_exception_when_nothing_can_be_written_for_the_launcher(ftrun: Ftrun) -> None:
    script = ftrun.script(
        "import os\nopen(os.environ['FTRUN_RUN_DIR'] + '/errors', 'w').close()\nraise ValueError('full')\n"
    )
    run = ftrun.start("--nproc-per-node", 1, "--spares", 0, script)
    assert run.wait() == 1
    assert "ftrun: rank 0: ValueError: full" in run.stderr and "FileExistsError" not in run.stderr, run.stderr
