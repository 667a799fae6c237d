"""A loop for each epoch, with an evaluation between them that communicates: weights and accuracies as under plain torchrun."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from tests.e2e import harness
from tests.e2e.harness import Outcome

SCRIPT = harness.SCRIPTS / "epochs.py"
Fault = tuple[int, int | str, int]


def digests(out: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in out.glob("digest-*")}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What plain torchrun ends with, for all test processes."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "epochs"
    with FileLock(f"{folder}.lock", timeout=harness.TIMEOUT * 2 + 60):
        if len(digests(folder / "out")) < 4:
            command = [str(SCRIPT)]
            outcome = harness.by_torch(folder, [*command, "gloo", str(folder / "out"), "()"], 0)
            assert outcome.code == 0, outcome.tail()
    return digests(folder / "out")


def run(folder: Path, faults: Sequence[Fault], options: Sequence[str] = (), words: Sequence[str] = ()) -> Outcome:
    arguments = ["ftrun", str(folder / "out"), repr(tuple(faults)), *words]
    return harness.finish(harness.start(folder, harness.script_command(folder, SCRIPT, arguments, options=options)), 0)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([(1, 2, 2)], id="second epoch"),
        pytest.param([(2, 1, 1), (3, 5, 1), (3, 3, 3)], id="one rank twice and another", marks=pytest.mark.slow),
        pytest.param([(0, 5, 0), (2, 4, 0)], id="first and third epoch", marks=pytest.mark.slow),
        pytest.param([(1, "after", 1)], id="between two epochs"),
    ],
)
def test_killed_in_a_later_epoch(folder: Path, expected: dict[str, str], faults: list[Fault]) -> None:
    outcome = run(folder, faults)
    assert outcome.code == 0, outcome.tail()
    assert len(harness.deaths(outcome)) == len(faults), outcome.tail()
    assert "a second loop outside job.epochs, at " in outcome.output
    assert digests(folder / "out") == expected, outcome.tail()


def test_a_rank_that_has_yet_to_ask_for_a_result_is_not_lost_with_the_one_that_died(
    folder: Path, expected: dict[str, str]
) -> None:
    outcome = run(folder, [(1, "after", 1)], words=["late"])
    assert outcome.code == 0, outcome.tail()
    assert len(harness.deaths(outcome)) == 1, outcome.tail()
    assert digests(folder / "out") == expected, outcome.tail()


@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_with_a_collective_still_to_come_between_two_epochs(
    folder: Path, expected: dict[str, str], restarts: int
) -> None:
    """The replacement is not connected to the others there: the run ends and says so, or all start again."""
    outcome = run(folder, [(1, "before", 2)], ["--max-restarts", str(restarts)])
    assert outcome.code == 1 - restarts, outcome.tail()
    assert "with this collective still to come" in outcome.output
    assert digests(folder / "out") == (expected if restarts else {}), outcome.tail()


def test_killed_while_another_rank_may_still_be_in_a_collective_between_two_epochs(
    folder: Path, expected: dict[str, str]
) -> None:
    """Either all goes well, or the run ends and says why: never another result."""
    outcome = run(folder, [(2, 0, 1), (3, 5, 1), (3, 3, 3)])
    if outcome.code == 1:
        assert "with this collective still to come" in outcome.output, outcome.tail()
        assert digests(folder / "out") == {}, outcome.tail()
    else:
        assert outcome.code == 0 and digests(folder / "out") == expected, outcome.tail()


@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_replacement_repeats_what_follows_an_update(folder: Path, expected: dict[str, str], restarts: int) -> None:
    outcome = run(folder, [(2, "updated", 3)], ["--max-restarts", str(restarts)])
    assert outcome.code == 1 - restarts, outcome.tail()
    assert "KeyboardInterrupt" in outcome.output
    assert digests(folder / "out") == (expected if restarts else {}), outcome.tail()


@pytest.mark.parametrize(
    ("faults", "began"),
    [
        pytest.param([(2, 3, 1)], {1: [0, 1, 2, 2, 3]}, id="in a step"),
        pytest.param(
            [(2, 0, 0), (3, 4, 0), (3, 5, 3)],
            {0: [0, 1, 2, 2, 3, 3], 3: [0, 1, 2, 3, 3]},
            id="three times",
            marks=pytest.mark.slow,
        ),
        pytest.param([(0, 0, 2)], {2: [0, 0, 1, 2, 3]}, id="in the first step", marks=pytest.mark.slow),
        pytest.param([(1, "after", 3)], {3: [0, 1, 1, 2, 3]}, id="after an epoch's loop"),
        pytest.param([(3, "after", 2)], {2: [0, 1, 2, 3, 3]}, id="after the last loop", marks=pytest.mark.slow),
    ],
)
def test_a_replacement_begins_in_the_epoch_that_runs(
    folder: Path, expected: dict[str, str], faults: list[Fault], began: dict[int, list[int]]
) -> None:
    """Whatever its script reads in the snapshot that was written meanwhile."""
    outcome = run(folder, faults, words=["resumes", "calls"])
    assert outcome.code == 0, outcome.tail()
    assert "a second loop outside" not in outcome.output
    for epoch, step, rank in faults:
        if isinstance(step, int):
            assert f"rank {rank} died in forward of epoch {epoch}, step {step} of 6 (SIGKILL" in outcome.output
    assert len(harness.deaths(outcome)) == len(faults), outcome.tail()
    assert digests(folder / "out") == expected, outcome.tail()
    for rank in range(4):
        lines = (folder / "out" / f"began-{rank}").read_text().splitlines()
        assert [int(line.split()[0]) for line in lines] == began.get(rank, [0, 1, 2, 3]), outcome.tail()


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([(1, "before", 2)], id="before its first collective", marks=pytest.mark.slow),
        pytest.param([(1, "between", 2)], id="between two collectives", marks=pytest.mark.slow),
        pytest.param([(3, "between", 0), (3, "after", 0)], id="in the last one, and after it"),
        pytest.param(
            [(0, "before", 1), (0, "between", 1), (0, "after", 3), (2, 2, 3), (2, "between", 2)],
            id="five",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("words", [["calls"], ["calls", "resumes"]], ids=["range", "epochs"])
def test_killed_in_an_evaluation(folder: Path, expected: dict[str, str], faults: list[Fault], words: list[str]) -> None:
    """All ranks make the evaluation again, and each appends what it gave once."""
    outcome = run(folder, faults, ["--max-replacements", "9"], words)
    assert outcome.code == 0, outcome.tail()
    epoch, where, rank = faults[0]
    if where != "before":
        after = f"epoch {epoch}" if "resumes" in words else "the loop"
        assert f"rank {rank} died in job.call after {after} (SIGKILL" in outcome.output, outcome.tail()
    assert len(harness.deaths(outcome)) == len(faults), outcome.tail()
    assert digests(folder / "out") == expected, outcome.tail()


ALONE = """
import sys, time
import torch
import torch.distributed as dist
import ftrun

dist.init_process_group("ftrun")
rank, case = dist.get_rank(), sys.argv[1]
model = torch.nn.Linear(4, 2)
ddp = torch.nn.parallel.DistributedDataParallel(model) if case != "without DDP" else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(ddp, optimizer)
for epoch in job.epochs(2):
    for step in job.steps(3 + (case == "more steps" and rank == 1)):
        with step:
            ddp(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0 or case == "more steps":
        job.call(lambda: None)
"""


@pytest.mark.parametrize("case", ["with DDP", "without DDP", "more steps"])
def test_a_call_that_not_all_ranks_make_is_refused(folder: Path, case: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "alone.py"
    script.write_text(ALONE)
    outcome = harness.finish(harness.start(folder, harness.script_command(folder, script, [case])), 0)
    assert outcome.code == 2, outcome.tail()
    said = {
        "with DDP": "rank 0 at the end of a job.call between two loops, ranks 1-3 in a step",
        "without DDP": "rank 0 at the end of a job.call between two loops, ranks 1-3 in a step",
        "more steps": "in a step; every rank makes the same steps and the same job.call",
    }
    assert "the ranks are not at the same place of the script: " in outcome.output
    assert said[case] in outcome.output, outcome.tail()


BUSY = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import ftrun

dist.init_process_group("ftrun")
rank = dist.get_rank()
model = torch.nn.Linear(4, 2)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(ddp, optimizer)


def evaluate() -> float:
    tried = os.path.exists("killed")
    if rank == 2 and not tried:
        time.sleep(0.5)
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    with torch.no_grad():
        end = time.monotonic() + (0 if tried else 30)
        while time.monotonic() < end:
            sum(range(1000))
    return float(rank)


for step in job.steps(3):
    if step.index == 2 and sys.argv[1] == "before a body":
        print("gave", job.call(evaluate), flush=True)
    with step:
        ddp(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
if sys.argv[1] == "after the loop":
    print("gave", job.call(evaluate), flush=True)
print("learns", torch.is_grad_enabled(), flush=True)
"""


@pytest.mark.parametrize("where", ["before a body", "after the loop"])
def test_a_long_evaluation_is_left_when_a_rank_dies_in_it(folder: Path, where: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "busy.py"
    script.write_text(BUSY)
    line = harness.script_command(folder, script, [where], options=["--stop-timeout", "2"])
    outcome = harness.finish(harness.start(folder, line), 0)
    assert outcome.code == 0, outcome.tail()
    assert len(harness.deaths(outcome)) == 1, outcome.tail()
    assert outcome.output.count("] gave ") == 4 and outcome.output.count("] learns True") == 4, outcome.tail()
    assert outcome.seconds < 25, "the survivors did the 30 seconds of their evaluation"


def test_an_exception_in_an_evaluation_is_the_scripts(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "raises.py"
    script.write_text(ALONE.replace("job.call(lambda: None)", "job.call(lambda: 1 / 0)"))
    outcome = harness.finish(harness.start(folder, harness.script_command(folder, script, ["with DDP"])), 0)
    assert outcome.code == 1, outcome.tail()
    assert "rank 0 failed: ZeroDivisionError" in outcome.output and "after the loop" in outcome.output, outcome.tail()
    assert not harness.deaths(outcome), outcome.tail()


@pytest.mark.parametrize("how", ["range", *(pytest.param(how, marks=pytest.mark.slow) for how in ("epochs", "calls"))])
def test_everyone_goes_back_to_an_earlier_loop(folder: Path, how: str) -> None:
    """Twice: the evaluations that a snapshot has undone take place again, and a later replacement is given the new ones."""
    script = harness.SCRIPTS / "goes_back.py"
    command = [str(script)]
    theirs = harness.by_torch(folder / "stock", [*command, "gloo", str(folder / "stock" / "out"), "range"], 0)
    assert theirs.code == 0, theirs.tail()
    options = ["--snapshot-every", "5", "--max-replacements", "2"]  # who gives way is not counted
    ours = harness.script_command(folder, script, ["ftrun", str(folder / "out"), how], options=options)
    outcome = harness.finish(harness.start(folder, ours), 0)
    assert outcome.code == 0, outcome.tail()
    assert outcome.output.count("is older than the loop that it was in") == 5, outcome.tail()
    assert digests(folder / "out") == digests(folder / "stock" / "out"), outcome.tail()
