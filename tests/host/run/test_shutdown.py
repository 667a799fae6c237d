"""How runs end: signals passed on once, time to clean up, SIGKILL after it, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ftrun.host.run import signal_forwarding
from tests.conftest import Ftrun, Run, processes_of, wait_for
from tests.host import direct
from tests.host.parts import Recorder, launch_context

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("up", flush=True)
go = {go!r}
while not (os.environ["RANK"] == "1" and os.path.exists(go)):
    time.sleep(0.01)
sys.exit(3)
"""

# takes its time to clean up, and counts how often it is told to
TIDY = """
import os, signal, time
base = {base!r} + "/rank-" + os.environ["RANK"]
def end(signum, frame):
    with open(base + ".signals", "a") as file:
        file.write(signal.Signals(signum).name + "\\n")
    time.sleep({cleaning})
    open(base + ".saved", "w").close()
    os._exit(0)
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(signum, end)
print("up", flush=True)
while True:
    time.sleep(0.01)
"""


def stubborn(ftrun: Ftrun) -> tuple[Path, Path]:
    go = ftrun.base / "go"
    return ftrun.script(STUBBORN.format(go=str(go))), go


def journal_note(run: Run, what: str) -> dict[str, object]:
    return next(line for line in run.journal() if line.get("note") == what)


# ---- the shutdown timeout --------------------------------------------------------------------------------------------


def test_stubborn_workers_are_killed_after_the_shutdown_timeout(ftrun: Ftrun) -> None:
    script, _ = stubborn(ftrun)
    run = direct.start(ftrun, script, shutdown_timeout=1.0, stop_timeout=20.0)
    run.wait_output("up", 2)
    began = time.monotonic()
    run.signal(signal.SIGTERM)
    assert run.wait(10) == 128 + signal.SIGTERM
    assert time.monotonic() - began >= 1.0
    assert "ranks 0, 1 did not end within 1 s of SIGTERM; killed" in run.stderr
    assert journal_note(run, "killed")["ranks"] == [0, 1]


def test_the_shutdown_timeout_holds_when_a_worker_failed(ftrun: Ftrun) -> None:
    script, go = stubborn(ftrun)
    run = direct.start(ftrun, script, shutdown_timeout=1.0, stop_timeout=20.0)
    run.wait_output("up", 2)
    go.touch()
    run.wait_output("rank 1 failed: exit 3")
    began = time.monotonic()
    assert run.wait(10) == 1
    assert time.monotonic() - began >= 1.0
    assert "rank 0 did not end within 1 s of SIGTERM; killed" in run.stderr
    assert run.stderr.splitlines()[-1].endswith(
        "no failure: rank 0 ended by ftrun (SIGTERM); rank 0 did not obey and had to be killed"
    )


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_workers_get_the_time_to_clean_up_and_the_signal_once(ftrun: Ftrun, signum: signal.Signals) -> None:
    script = ftrun.script(TIDY.format(base=str(ftrun.base), cleaning=1.5))
    run = direct.start(ftrun, script, stop_timeout=0.2)
    run.wait_output("up", 2)
    run.signal(signum)
    assert run.wait(20) == 128 + signum
    for rank in (0, 1):
        assert (ftrun.base / f"rank-{rank}.saved").exists()
        assert (ftrun.base / f"rank-{rank}.signals").read_text() == f"{signum.name}\n"
    assert journal_note(run, "told-to-end")["signal"] == signum.name


def test_spares_are_killed_at_once(ftrun: Ftrun) -> None:
    script = ftrun.script(TIDY.format(base=str(ftrun.base), cleaning=1.5))
    run = direct.start(ftrun, script, 1, spares=1)
    # the script never asks for a group, so the spare comes to park nowhere: it handles the signal like rank 0
    run.wait_output("up", 1)
    spare = run.pid("ftrun spare")
    run.signal(signal.SIGTERM)
    wait_for(lambda: not Path(f"/proc/{spare}").exists(), "the spare's end", 1.0)
    assert run.process.poll() is None, "the rank still cleans up"
    assert run.wait(20) == 128 + signal.SIGTERM
    assert (ftrun.base / "rank-0.saved").exists()


# ---- second signals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_second_ctrl_c_ends_at_once(ftrun: Ftrun, first: signal.Signals) -> None:
    script, _ = stubborn(ftrun)
    run = direct.start(ftrun, script, shutdown_timeout=50.0)
    run.wait_output("up", 2)
    run.signal(first)
    run.wait_output(f"got {first.name}; ending the workers")
    assert run.process.poll() is None
    time.sleep(0.2)  # a person's second Ctrl-C; an echo within 0.05 s would not count
    began = time.monotonic()
    run.signal(signal.SIGINT)
    assert run.wait(10) == 128 + first
    assert time.monotonic() - began < 3.0
    assert "got SIGINT while the workers end; killed them at once" in run.stderr


def test_the_echo_of_a_signal_is_not_a_second_one(ftrun: Ftrun) -> None:
    """A terminal's Ctrl-C reaches a wrapper such as `uv run` and ftrun, and the wrapper passes it on."""
    script = ftrun.script(TIDY.format(base=str(ftrun.base), cleaning=1.0))
    run = direct.start(ftrun, script, 1)
    run.wait_output("up", 1)
    os.kill(run.process.pid, signal.SIGINT)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait(20) == 128 + signal.SIGINT
    assert (ftrun.base / "rank-0.saved").exists()
    assert (ftrun.base / "rank-0.signals").read_text() == "SIGINT\n"


def test_signal_while_a_failed_run_ends(ftrun: Ftrun) -> None:
    script, go = stubborn(ftrun)
    run = direct.start(ftrun, script, shutdown_timeout=50.0)
    run.wait_output("up", 2)
    go.touch()
    run.wait_output("rank 1 failed: exit 3")
    run.signal(signal.SIGINT)
    assert run.wait(10) == 1, "the failure keeps its exit code"
    assert "root cause: rank 1 left with exit code 3" in run.stderr


# ---- signals at other moments ----------------------------------------------------------------------------------------


def test_signal_in_the_pause_before_a_restart(ftrun: Ftrun) -> None:
    run = direct.start(ftrun, ftrun.script("raise SystemExit(4)\n"), 1, max_restarts=9)
    run.wait_output("after a pause of 4 s")
    run.signal(signal.SIGTERM)
    assert run.wait(3) == 128 + signal.SIGTERM


RECOVERING = """
import time
import torch, torch.distributed as dist, ftrun
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("ftrun")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(model=model, optimizer=opt)
for step in job.steps(1000):
    with step:
        print("step", step.index, flush=True)
        time.sleep(0.02)
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
"""


def test_signal_during_a_recovery(ftrun: Ftrun) -> None:
    run = direct.start(ftrun, ftrun.script(RECOVERING))
    run.wait_output("step 5", 2)
    os.kill(run.pid("ftrun rank 1"), signal.SIGKILL)
    run.wait_output("stopping 1 healthy worker")
    run.signal(signal.SIGTERM)
    assert run.wait(15) == 128 + signal.SIGTERM
    assert "root cause" not in run.stderr


def test_too_many_replacements_asks_for_a_requeue(ftrun: Ftrun) -> None:
    run = direct.start(ftrun, ftrun.script(RECOVERING), max_replacements=0)
    run.wait_output("step 5", 2)
    os.kill(run.pid("ftrun rank 1"), signal.SIGKILL)
    assert run.wait(15) == 75
    assert "ftrun: root cause: rank 1 died of SIGKILL, " in run.stderr
    assert "signal SIGKILL (exit code 137)\n" in run.stderr
    assert "ftrun did not retry: the rank died once within 3600 s, where --max-replacements is 0" in run.stderr
    assert "ftrun: no failure: rank 0 ended by ftrun (SIGTERM)" in run.stderr


def test_a_repaired_failure_is_not_the_cause_of_a_later_one(ftrun: Ftrun) -> None:
    run = direct.start(ftrun, ftrun.script(RECOVERING), max_replacements=1)
    run.wait_output("step 5", 2)
    os.kill(run.pid("ftrun rank 1"), signal.SIGKILL)
    run.wait_output("recovered in")
    os.kill(run.pid("ftrun rank 0"), signal.SIGSEGV)
    run.wait_output("recovered in", 2)
    os.kill(run.pid("ftrun rank 0"), signal.SIGABRT)
    assert run.wait(15) == 75
    assert run.stderr.count("ftrun: root cause: ") == 1
    assert "ftrun: root cause: rank 0 died of SIGABRT, " in run.stderr
    assert "ftrun replaced rank 0 once, then gave up: the rank died twice within 3600 s, where --max-replacements is 1" in run.stderr
    assert "also failed" not in run.stderr


def test_unhandled_signal_leaves_nobody_and_the_log_says_why(ftrun: Ftrun) -> None:
    run = direct.start(ftrun, stubborn(ftrun)[0], signals=[signal.SIGINT])
    run.wait_output("up", 2)
    run.signal(signal.SIGTERM)
    assert run.wait(10) == -signal.SIGTERM, "the default action"
    wait_for(lambda: not processes_of(ftrun.runs_root), "the end of every process", 5.0)
    text = next((ftrun.base / "logs").glob("*/services.log")).read_text()
    assert f"the launcher ({run.process.pid}) is gone; ending 2 workers" in text


def test_killed_launcher_is_named_in_the_log(ftrun: Ftrun) -> None:
    run = direct.start(ftrun, stubborn(ftrun)[0], 3)
    run.wait_output("up", 3)
    began = time.monotonic()
    run.signal(signal.SIGKILL)
    run.wait()
    wait_for(lambda: not processes_of(ftrun.runs_root), "the end of every process", 5.0)
    assert time.monotonic() - began < 4.0
    text = next((ftrun.base / "logs").glob("*/services.log")).read_text()
    assert f"fd store: {time.strftime('%Y-')}" in text
    assert f"the launcher ({run.process.pid}) is gone; ending 3 workers" in text


# ---- forwarded signals -----------------------------------------------------------------------------------------------

LISTENS = """
import os, signal, subprocess, sys, time
rank, base = os.environ["RANK"], {base!r}
child = subprocess.Popen(["sleep", "300"])
if rank == "1":
    print("up", flush=True)
    while not os.path.exists(base + "/late"):
        time.sleep(0.01)
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(time.monotonic()))
if rank == "0":
    print("up", flush=True)
while not seen:
    time.sleep(0.01)
print("got it", flush=True)
time.sleep(0.3)
assert child.poll() is None, "the signal is for the main process"
child.kill()
print("times", len(seen), flush=True)
"""


def test_forwarded_signal_reaches_the_ranks_and_changes_nothing(ftrun: Ftrun) -> None:
    script = ftrun.script(LISTENS.format(base=str(ftrun.base)))
    run = direct.start(ftrun, script, forward=[signal.SIGUSR1, signal.SIGUSR2])
    run.wait_output("up", 2)
    run.signal(signal.SIGUSR1)
    run.wait_output("[rank 0] got it")
    run.wait_output("got SIGUSR1; 1 worker of 2 will get it once it is handled there")
    (ftrun.base / "late").touch()
    assert run.wait() == 0, run.stderr
    assert run.stdout.count("times 1") == 2
    assert "died" not in run.stderr and "failed" not in run.stderr


def test_forwarded_signal_before_anybody_is_there(ftrun: Ftrun) -> None:
    script = ftrun.script(LISTENS.format(base=str(ftrun.base)))
    (ftrun.base / "late").touch()
    run = direct.start(ftrun, script, forward=[signal.SIGUSR1])
    run.wait_output("ftrun: run ")
    run.signal(signal.SIGUSR1)
    assert run.wait() == 0, run.stderr
    assert run.stdout.count("times 1") == 2


def test_forwarded_signal_that_is_also_an_ending_one_only_goes_to_the_ranks(ftrun: Ftrun) -> None:
    script = ftrun.script(TIDY.format(base=str(ftrun.base), cleaning=0.1))
    run = direct.start(ftrun, script, forward=[signal.SIGTERM])
    run.wait_output("up", 2)
    run.signal(signal.SIGTERM)
    assert run.wait() == 0, "the script ended by itself"


WAITS = """
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("up", flush=True)
while signal.SIGUSR1 not in signal.sigpending():
    time.sleep(0.01)
print("got it", flush=True)
"""


def test_forwarded_signal_that_a_script_blocks(ftrun: Ftrun) -> None:
    run = direct.start(ftrun, ftrun.script(WAITS), forward=[signal.SIGUSR1])
    run.wait_output("up", 2)
    run.signal(signal.SIGUSR1)
    assert run.wait() == 0, run.stderr
    assert run.stdout.count("got it") == 2


ANSWERS = """
import signal, sys
signal.signal(signal.SIGUSR1, print)
for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK):
    signal.pthread_sigmask(how, [signal.SIGUSR2])
    print(flush=True)
    sys.stdin.readline()
"""


def test_a_signal_that_is_blocked_for_a_moment_is_held_back(tmp_path: Path) -> None:
    recorder = Recorder()
    context = launch_context(tmp_path, recorder)
    with subprocess.Popen(
        [sys.executable, "-c", ANSWERS], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        worker = SimpleNamespace(rank=0, pid=process.pid, reported=False)
        pool = SimpleNamespace(living=lambda: [worker])
        forwarder = signal_forwarding.Forwarder(context, pool)  # type: ignore[arg-type]
        process.stdout.readline()
        answers = {
            s: signal_forwarding.answer_of(process.pid, s) for s in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)
        }
        forwarder.forward(signal.SIGUSR2)
        print(file=process.stdin, flush=True)
        process.stdout.readline()
        context.loop.run_once()  # the next look
        assert (
            signal_forwarding.answer_of(process.pid, signal.SIGUSR2) is signal_forwarding.SignalAnswer.DIES
            and process.poll() is None
        )
        process.kill()
    assert answers == {
        signal.SIGUSR1: signal_forwarding.SignalAnswer.TAKEN,
        signal.SIGUSR2: signal_forwarding.SignalAnswer.BLOCKED,
        signal.SIGWINCH: signal_forwarding.SignalAnswer.TAKEN,
    }
    assert recorder.lines == ["got SIGUSR2; 1 worker of 1 will get it once it is handled there"]
    assert signal_forwarding.answer_of(process.pid, signal.SIGUSR1) is signal_forwarding.SignalAnswer.DIES, "it is gone"


# ---- ftrun stop ------------------------------------------------------------------------------------------------------


def test_stop_waits_for_the_workers_clean_up(ftrun: Ftrun) -> None:
    script = ftrun.script(TIDY.format(base=str(ftrun.base), cleaning=1.0))
    run = direct.start(ftrun, script, run_id="tidy")
    run.wait_output("up", 2)
    result = ftrun.call("stop", "--yes")
    assert result.returncode == 0, result.stderr
    assert result.stderr == "ftrun: ending run tidy\nftrun: run tidy ended\n" and result.stdout == ""
    assert not list(ftrun.runs_root.glob("[!.]*"))
    assert run.wait(5) == 128 + signal.SIGTERM
    assert (ftrun.base / "rank-1.saved").exists()


def test_stop_says_when_the_run_takes_longer(ftrun: Ftrun) -> None:
    run = direct.start(ftrun, stubborn(ftrun)[0], run_id="slow", shutdown_timeout=50.0)
    run.wait_output("up", 2)
    result = ftrun.call("stop", "slow", "--wait", "0.3", "--yes")
    assert result.returncode == 1
    assert "run slow" in result.stderr and "still ends after 0.3 s" in result.stderr
    assert ftrun.call("stop", "slow", "--yes").returncode == 0, "the second signal kills"
    assert run.wait(5) == 128 + signal.SIGTERM


def test_stop_without_a_run(ftrun: Ftrun) -> None:
    result = ftrun.call("stop", "nobody")
    assert result.returncode == 4
    assert result.stderr == "ftrun: error: no live run named nobody; those that live: ftrun runs [ftrun explain F103]\n"
    assert ftrun.call("stop").returncode == 4


# ---- restarts --------------------------------------------------------------------------------------------------------

RESTARTED = """
import os, signal, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
base = {base!r}
def end(signum, frame):
    open(base + "/saved-" + rank, "w").close()
    if rank == "0":
        os._exit(0)
signal.signal(signal.SIGTERM, end)
open(base + "/up-" + rank + "-" + attempt, "w").close()
if attempt == "0":
    while rank != "2" or not all(os.path.exists(base + f"/up-{{r}}-0") for r in range(3)):
        time.sleep(0.01)
    sys.exit(3)
"""


def test_a_restart_lets_healthy_workers_clean_up(ftrun: Ftrun) -> None:
    run = direct.start(
        ftrun, ftrun.script(RESTARTED.format(base=str(ftrun.base))), nproc=3, max_restarts=1, shutdown_timeout=1.0
    )
    assert run.wait(20) == 0, run.stderr
    assert sorted(p.name for p in ftrun.base.glob("saved-*")) == ["saved-0", "saved-1"]
    assert sorted(p.name for p in ftrun.base.glob("up-*-1")) == ["up-0-1", "up-1-1", "up-2-1"]
    # rank 1 stays after its signal handler, and is killed when the time is up
    told = [line["t"] for line in run.journal() for a in line.get("actions", ()) if a["kind"] == "Dismiss"]
    killed = [line["t"] for line in run.journal() if line.get("event", {}).get("name") == "leave"]
    assert len(told) == 2 and killed[0] - told[0] >= 1.0


# ---- the journal -----------------------------------------------------------------------------------------------------


def test_a_journal_that_cannot_be_kept_fails_nothing(ftrun: Ftrun) -> None:
    kept = str(ftrun.base / "logs" / "*")
    in_its_place = f"import glob, os\nos.mkdir(glob.glob({kept!r})[0] + '/journal.jsonl')\n"
    run = ftrun.start("--nproc-per-node", 1, ftrun.script(in_its_place))
    assert run.wait() == 0, run.stderr
    assert "the journal is not kept: Is a directory; nothing can show this run later" in run.stderr
