"""`ftrun inject-fault` and `ftrun drain` on a live run: what they do, what they say, what they refuse; and equal results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftrun.faults.dice import Dice
from tests.e2e import harness
from tests.e2e.conftest import Reference
from tests.e2e.test_services import SLOW, Live, until
from tests.faults.fake_nvml import FakeNvml

Command = Callable[..., subprocess.CompletedProcess[str]]


class Struck(Live):
    """A live run, and commands that act on it, as scripts give them."""

    def call(self, *words: str, seconds: float = 40.0) -> subprocess.CompletedProcess[str]:
        words = words if "--yes" in words else (*words, "--yes")
        return subprocess.run(
            [harness.tool("ftrun"), *words],
            env=harness.environment(self.folder),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=self.folder,
        )

    def inject(self, *words: str) -> dict[str, Any]:
        done = self.call("inject-fault", *words, "--json")
        assert done.returncode == 0, done.stderr + self.running.output
        facts = json.loads(done.stdout)
        assert facts["fired"] is True
        return dict(facts)


@pytest.fixture
def live(folder: Path) -> Iterator[Callable[..., Struck]]:
    """live(options...): a slow run of the reference script; ended after the test if it still goes on."""
    started: list[Struck] = []

    def begin(*options: str, steps: int = 12, spares: int = 1) -> Struck:
        arguments = [*SLOW, "--steps", str(steps)]
        command = harness.ftrun_command(
            folder, arguments, spares=spares, options=["--max-replacements", "20", *options]
        )
        started.append(Struck(folder, command))
        return started[-1]

    yield begin
    for run in started:
        if run.running.process.poll() is None:
            run.running.process.send_signal(signal.SIGKILL)
            run.running.process.wait()


def fired(outcome: harness.Outcome) -> list[tuple[str, int, str]]:
    notes = [note["fired"] for note in outcome.notes("fault")]
    assert all(note["source"] == "request" for note in notes)
    return [(note["kind"], note["rank"], note["phase"]) for note in notes]


def test_kinds_on_a_live_run(stock: Reference, live: Callable[..., Struck]) -> None:
    """One run, several faults: from outside, at a phase, at a step, and one that ends by itself."""
    run = live(steps=24)
    run.reach(1)
    struck = run.inject("kill", "--rank", "2")
    assert struck["rank"] == 2 and struck["pid"] > 0
    run.said("recovered in")
    assert run.inject("exception", "--rank", "0")["phase"] in ("forward", "backward")
    at = run.inject("kill", "--rank", "1", "--at", "update", "--step", "12")
    assert (at["phase"], at["step"]) == ("update", 12)
    assert run.inject("slow:3", "--rank", "3", "--at", "forward", "--for", "0.2")["phase"] == "forward"
    assert run.inject("freeze", "--for", "0.05")["rank"] == 3
    outcome = run.finish()
    harness.same(stock(*SLOW, "--steps", "24"), outcome)
    assert [(k, r) for k, r, _ in fired(outcome)] == [
        ("kill", 2), ("exception", 0), ("kill", 1), ("slow", 3), ("freeze", 3),
    ]  # fmt: skip
    assert harness.replaced_ranks(outcome) == {1, 2}, "a short freeze is no failure"
    assert "injected fault: kill strikes rank 1 in update of step 12" in outcome.output


def test_a_rank_is_moved_without_losing_anything(stock: Reference, live: Callable[..., Struck]) -> None:
    run = live("--max-replacements", "0", steps=24)
    run.reach(1)
    done = run.call("drain", "--rank", "1", "--json")
    assert done.returncode == 0, done.stderr + run.running.output
    facts = json.loads(done.stdout)
    assert facts["moved"] is True and facts["rank"] == 1 and facts["to"] != facts["from"]
    outcome = run.finish()
    harness.same(stock(*SLOW, "--steps", "24"), outcome)
    assert [d["cause"] for d in outcome.events("Died") if d["step"] is not None] == ["drain"]
    assert harness.replaced_ranks(outcome) == {1}
    assert outcome.notes("incident")[0]["sources"]["1"]["name"] == "adopt"
    assert f"rank 1 leaves its worker before step {facts['step']}, as asked for" in outcome.output


GIVES_ITS_LOSS = """
import time, torch, torch.distributed as dist, ftrun

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)
    def forward(self, x):
        return self.inner(x).square().mean()

torch.manual_seed(0)
net = Net()
dist.init_process_group("ftrun")
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
job = ftrun.protect(model=net, optimizer=optimizer)
for step in job.steps(4000):
    with step:
        optimizer.zero_grad()
        net(torch.ones(2, 4)).backward()
        optimizer.step()
    time.sleep(0.02)
"""


def test_a_fault_that_changes_nothing_says_so(folder: Path) -> None:
    """A NaN in a loss that the model itself gives reaches no gradient; one in a gradient is found."""
    folder.joinpath("loss.py").write_text(GIVES_ITS_LOSS)
    plan = [harness.fault("nan", 0, "forward", 1)]
    run = Struck(folder, harness.script_command(folder, folder / "loss.py", [], plan, ranks=2, spares=0))
    run.said("nan struck rank 0 in forward of step 1; it changed nothing: every gradient is finite")
    assert run.inject("nan", "--rank", "1", "--at", "forward")["unfelt"] is True
    done = run.call("inject-fault", "nan", "--rank", "1", "--at", "forward")
    assert f"nan struck rank 1 of run {run.run_dir.name}" in done.stderr and "it changed nothing" in done.stderr
    assert "unfelt" not in run.inject("nan", "--rank", "1", "--at", "backward")
    run.said("everyone does the step again")
    assert run.call("stop").returncode == 0
    outcome = run.finish()
    assert [note["file"] for note in outcome.notes("unfelt")] == ["0-1.json", "request-1-1.json", "request-2-1.json"]


def test_what_is_refused(live: Callable[..., Struck]) -> None:
    run = live(steps=4000)
    run.reach(3)
    name = run.run_dir.name
    refused = [
        (["kil"], 2, "unknown fault kind 'kil', did you mean kill?"),
        (["kill", "--rank", "9"], 2, "there is no rank 9 here: the run has ranks 0 to 3"),
        (["kill", "--at", "backwards"], 2, "unknown phase 'backwards', did you mean backward?"),
        (["kill", "--at", "gate", "--step", "0"], 2, "step 0 is over"),
        (["kill", "--at", "gate", "--epoch", "0"], 2, "rank 3 is in no loop of job.epochs"),
        (["kill", "--for", "2"], 2, "kill has no duration"),
        (["nan", "--at", "update"], 2, "nan is possible in forward and backward"),
        (["launcher-kill", "--rank", "1"], 2, "launcher-kill strikes no rank"),
        (["--random", "3"], 2, "how likely a step has a fault"),
        (["no-such-run", "kill"], 4, "no live run named no-such-run"),
        (["kill", "no-such-run"], 4, "no live run named no-such-run"),
        ([name, "kil"], 2, "unknown fault kind 'kil', did you mean kill?"),
        (["xid:79"], 1, "this run has no devices that NVML watches"),
        (["kill", "--at", "stop", "--wait", "0.2"], 1, "stop is reached only while another fault is repaired"),
    ]
    for words, code, said in refused:
        done = run.call("inject-fault", *words)
        assert (done.returncode, done.stdout) == (code, ""), (words, done.stderr)
        assert said in done.stderr, words
    assert run.call("drain", "--rank", "4").returncode == 2
    if os.getuid() == 0:
        os.chown(run.run_dir, 12345, -1)
        for command in (["inject-fault", "kill"], ["drain", "--rank", "1"], ["stop"]):
            done = run.call(*command)
            assert (done.returncode, f"run {name} belongs to user 12345, not to you" in done.stderr) == (2, True), command
        os.chown(run.run_dir, 0, -1)
    assert run.call("inject-fault", name, "kill", "--after", "0.1").returncode == 0
    run.said("recovered in")
    assert run.call("stop").returncode == 0
    outcome = run.finish()
    assert outcome.code == 143 and fired(outcome) == [("kill", 3, outcome.notes("fault")[0]["fired"]["phase"])]
    assert outcome.notes("unfired") == [], "what was taken back is not waiting"
    assert run.call("inject-fault", "kill").returncode == 4


def test_a_person_is_asked_and_an_interrupt_takes_it_back(live: Callable[..., Struck]) -> None:
    run = live(steps=400)
    run.reach(1)
    for answer, code in (("n\n", 1), ("y\n", 0)):
        assert at_a_terminal(run, ["inject-fault", "slow:1", "--at", "forward"], answer) == (code, True)
    assert at_a_terminal(run, ["inject-fault", "slow:1", "--at", "forward", "--yes"], "") == (0, False)
    waiting = subprocess.Popen(
        [harness.tool("ftrun"), "inject-fault", "kill", "--at", "reset", "--yes"],
        cwd=run.folder,
        env=harness.environment(run.folder),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    asked = run.run_dir / "requests" / "3.json"
    until(asked.exists, "the request")
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate(timeout=20)
    assert (waiting.returncode, b"taken back" in said) == (130, True)
    assert not asked.exists()
    assert run.inject("kill", "--rank", "0")["fired"]
    run.said("recovered in")
    assert run.call("stop").returncode == 0
    assert len(harness.read_journal(run.folder)) and run.running.process.wait(30) == 143
    outcome = harness.finish(run.running)
    assert [k for k, _, _ in fired(outcome)] == ["slow", "slow", "kill"]


def at_a_terminal(run: Struck, words: list[str], answer: str) -> tuple[int, bool]:
    """Exit code of a command that has a terminal, and whether it asked."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [harness.tool("ftrun"), *words],
        cwd=run.folder, env=harness.environment(run.folder), stdin=theirs, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(theirs)
    os.write(ours, answer.encode())
    _, said = process.communicate(timeout=30)
    os.close(ours)
    return process.returncode, b"[y/N]" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["node-kill", "launcher-kill"])
def test_the_whole_run_dies(live: Callable[..., Struck], folder: Path, kind: str) -> None:
    run = live(steps=400)
    run.reach(1)
    run_dir = run.run_dir
    assert run.inject(kind)["pid"] == run.launcher
    assert run.running.process.wait(20) == -signal.SIGKILL
    until(lambda: not harness.strays(folder), "the end of every process", 10)
    if kind == "launcher-kill":
        until(lambda: not run_dir.exists(), "the fd store to tidy up", 10)
        lines = harness.read_journal(folder)
    else:  # nobody was left to tidy up: the next command does
        lines = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
        assert run.call("inject-fault", run_dir.name, "kill").returncode == 3
        assert harness.ftrun(folder / "next", [], env={"FTRUN_RUNS_ROOT": str(folder / "runs")}).code == 0
        assert not run_dir.exists()
    assert [line["fired"]["kind"] for line in lines if line.get("note") == "fault"] == [kind]


@pytest.mark.slow
def test_random_faults_are_the_same_for_the_same_seed(stock: Reference, folder: Path) -> None:
    """By an option and asked for on the live run; equal results, and each firing in the journal."""
    struck = []
    for name in ("first", "second"):
        options = ["--max-replacements", "50", "--random-faults", "0.2", "--fault-seed", "6"]
        outcome = harness.ftrun(folder / name, [], options=options)
        harness.same(stock(), outcome)
        notes = [note["fired"] for note in outcome.notes("fault")]
        struck.append([(f["source"], f["kind"], f["rank"], f["step"], f["phase"]) for f in notes])
        assert outcome.notes("random-faults")[0]["seed"] == 6
        assert "injected fault: " in outcome.output
    assert struck[0] == struck[1] == drawn(0.2, 6, range(12))


def drawn(rate: float, seed: int, steps: range) -> list[tuple[str, str, int, int, str]]:
    """What the seed says, computed apart from any run."""
    found = [Dice(rate, seed, 4).draw(step) for step in steps]
    return [(f.source, f.kind, f.rank, f.step or 0, f.at) for f in found if f]


@pytest.mark.slow
def test_random_faults_on_a_live_run(live: Callable[..., Struck]) -> None:
    run = live(steps=400)
    run.reach(1)
    done = run.call("inject-fault", "kill", "--random", "0.5", "--seed", "3", "--json")
    facts = json.loads(done.stdout)
    assert (done.returncode, facts["kind"]) == (0, "kill")
    run.said("recovered in")
    assert run.call("inject-fault", "--random", "0").returncode == 0
    run.said("no more random faults")
    assert run.call("stop").returncode == 0
    assert run.running.process.wait(30) == 143
    outcome = harness.finish(run.running)
    notes = [note["fired"] for note in outcome.notes("fault")]
    dice = Dice(0.5, 3, 4, "kill", first=facts["first"])
    expected = [f for f in map(dice.draw, range(notes[-1]["step"] + 1)) if f]
    assert [(f["rank"], f["step"], f["phase"]) for f in notes] == [(f.rank, f.step, f.at) for f in expected]


@pytest.mark.slow
def test_faults_of_a_device(stock: Reference, folder: Path) -> None:
    """Told to the launcher and marked as simulated; tests/e2e/matrix.py has those that come from a (fake) driver."""
    command = harness.ftrun_command(folder, [*SLOW, "--steps", "24"], options=["--max-replacements", "20"])
    at = command.index(str(harness.REFERENCE))
    env = FakeNvml(folder, 6).env
    run = Struck(folder, [*command[:at], str(harness.SCRIPTS / "on_device.py"), *command[at:]], env)
    run.reach(1)
    run.ended_or(lambda: '"rank": 2' in _text(run.run_dir / "devices.json"), "rank 2 in devices.json")
    assert run.inject("xid:48", "--rank", "2")["rank"] == 2
    run.said("recovered in")
    outcome = run.finish()
    harness.same(stock(*SLOW, "--steps", "24"), outcome)
    assert harness.replaced_ranks(outcome) == {2}
    (event,) = outcome.notes("device-event")
    assert (event["kind"], event["code"], event.get("simulated", False)) == ("xid", 48, True)
    assert fired(outcome)[0][:2] == ("xid", 2)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_plan_that_can_be_read_only_once(stock: Reference, folder: Path) -> None:
    """`--fault-plan <(...)`, and a file that is gone when a replacement reads it: the run has a copy."""
    plan = [harness.kill(1, "backward", 3), harness.kill(1, "backward", 6)]
    command = harness.ftrun_command(folder, [], plan)
    text = (folder / "plan.toml").read_text()
    (folder / "plan.toml").unlink()
    os.mkfifo(folder / "plan.toml")
    running = harness.start(folder, command)
    with (folder / "plan.toml").open("w") as pipe:
        pipe.write(text)
    outcome = harness.finish(running)
    harness.same(stock(), outcome)
    assert len(harness.deaths(outcome)) == 2
