"""Deaths in places that a fault plan does not name: between loops, in job.call, beside the loop, after it.

Every run must end on the weights, optimizer state and random streams of an uninterrupted one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from ftrun.worker.link.position import Position
from ftrun.worker.repair.kit import PendingRecovery
from ftrun.worker.step.loop import Loop
from tests.conftest import Ftrun, Run

SCRIPTS = Path(__file__).resolve().parent / "scripts"
Baseline = Callable[[int], dict[str, str]]


def digests(run: Run) -> dict[str, str]:
    """rank -> digest; a rank that printed it twice (it died after that) must have printed the same."""
    found: dict[str, str] = {}
    for rank, digest in re.findall(r"^\[rank (\d+)\] digest (\w+)$", run.stdout, re.M):
        assert found.setdefault(rank, digest) == digest, f"rank {rank} printed two digests\n{run.stderr}"
    return found


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """baseline(ranks): what an uninterrupted run prints."""
    known: dict[int, dict[str, str]] = {}

    def run(ranks: int) -> dict[str, str]:
        if ranks not in known:
            clean = Ftrun(tmp_path_factory.mktemp("clean"))
            started = clean.start("--nproc-per-node", ranks, "--spares", 0, SCRIPTS / "loops.py")
            assert started.wait() == 0, started.stderr
            known[ranks] = digests(started)
            assert len(known[ranks]) == ranks
            assert not clean.clean_up()
        return known[ranks]

    return run


@pytest.mark.parametrize(
    ("place", "ranks", "spares"),
    [
        pytest.param("call 1@0", 3, 1, marks=pytest.mark.slow),
        pytest.param("call 5 late@1", 3, 1, marks=pytest.mark.slow),
        pytest.param("handed out 4@2", 3, 1, marks=pytest.mark.slow),
        pytest.param("subgroups 5@1", 3, 0, marks=pytest.mark.slow),
        pytest.param("left 3@2", 3, 1, marks=pytest.mark.slow),
        pytest.param("after loop 0@0", 3, 1, marks=pytest.mark.slow),
        pytest.param("before loop 2@2", 3, 1, marks=pytest.mark.slow),
        pytest.param("after loop 2@0", 3, 1, marks=pytest.mark.slow),
        pytest.param("tail@1", 3, 0, marks=pytest.mark.slow),
        ("very end@2", 3, 1),
        pytest.param("subgroups 5@0", 1, 1, marks=pytest.mark.slow),
        pytest.param("tail@0", 1, 0, marks=pytest.mark.slow),
    ],
)
def test_death_at(ftrun: Ftrun, baseline: Baseline, place: str, ranks: int, spares: int) -> None:
    run = ftrun.start("--nproc-per-node", ranks, "--spares", spares, SCRIPTS / "loops.py", KILL=place)
    assert run.wait() == 0, run.stderr
    assert (ftrun.base / "killed").exists(), "nothing was killed"
    assert digests(run) == baseline(ranks), run.stderr
    assert "(SIGKILL" in run.stderr and "bit-identical to an uninterrupted run: yes" in run.stderr


def test_death_before_the_first_loop_starts_all_again(ftrun: Ftrun, baseline: Baseline) -> None:
    """Nothing is lost there, and what the ranks told each other so far may not be known in full."""
    run = ftrun.start("--nproc-per-node", 3, SCRIPTS / "loops.py", KILL="before loop 0@1")
    assert run.wait() == 0, run.stderr
    assert digests(run) == baseline(3)
    assert "rank 1 failed (SIGKILL); all workers start again" in run.stderr


def test_checkpoint_is_saved_and_loaded_also_by_a_replacement(ftrun: Ftrun) -> None:
    script, file = SCRIPTS / "checkpoint.py", str(ftrun.base / "model.pt")
    whole = ftrun.start("--nproc-per-node", 2, "--spares", 0, script, SAVE=file)
    assert whole.wait() == 0, whole.stderr
    wanted = sorted(whole.stdout.splitlines())
    assert len(wanted) == 2 and "end 7 " in wanted[0]
    later = ftrun.start("--nproc-per-node", 2, "--spares", 0, script, LOAD=file, KILL="1")
    assert later.wait() == 0, later.stderr
    assert sorted(later.stdout.splitlines()) == wanted
    assert "rank 1 died in forward of step 6" in later.stderr and "uninterrupted run: yes" in later.stderr
    assert not list(ftrun.base.glob("*.tmp"))


EPOCHS = """
import torch, torch.distributed as dist, ftrun
dist.init_process_group("ftrun")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(model, optimizer)
numbers = {}
for epoch in job.epochs(4):
    for step in job.steps(3):
        numbers[epoch, step.index] = step.number
        with step:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    job.call(dist.barrier)
assert all(number == 3 * epoch + index for (epoch, index), number in numbers.items()), numbers
print("numbered", job.rank, len(numbers))
"""


def test_a_plan_strikes_a_step_of_an_epoch_and_steps_are_numbered_over_all_of_them(ftrun: Ftrun) -> None:
    plan = ftrun.base / "plan.toml"
    plan.write_text('[[fault]]\nkind = "kill"\nrank = 1\nepoch = 2\nstep = 1\nat = "backward"\n')
    run = ftrun.start("--nproc-per-node", 2, "--fault-plan", plan, ftrun.script(EPOCHS))
    assert run.wait() == 0, run.stderr
    assert "rank 1 died in backward of epoch 2, step 1 of 3 (SIGKILL" in run.stderr, run.stderr
    assert sorted(run.stdout.splitlines()) == ["[rank 0] numbered 0 12", "[rank 1] numbered 1 12"]


EARLY = """
import sys, torch, torch.distributed as dist, ftrun
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dist.init_process_group("ftrun")
job = ftrun.protect(model=torch.nn.parallel.DistributedDataParallel(model), optimizer=optimizer)
for step in job.steps(100):
    with step:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    if step.index == 3:
        {leave}
print("after", step.index)
"""


@pytest.mark.parametrize(("leave", "printed"), [("break", 2), pytest.param("sys.exit(0)", 0, marks=pytest.mark.slow)])
def test_leaving_the_loop_early(ftrun: Ftrun, leave: str, printed: int) -> None:
    run = ftrun.start("--nproc-per-node", 2, ftrun.script(EARLY.format(leave=leave)))
    assert run.wait() == 0, run.stderr
    assert run.stdout.count("after 3") == printed
    assert "incident" not in run.stderr


def test_everyone_goes_back_to_the_end_of_a_loop_and_the_next_one_begins_its_first_step_once() -> None:
    loop = Loop.__new__(Loop)
    loop.kit = kit = MagicMock(pending=PendingRecovery(), position=Position())
    loop._position = kit.position
    loop._survivor, loop._commit, loop._observers, loop.calls = (MagicMock() for _ in range(4))
    kit.position.number = 9
    kit.pending.restart, kit.pending.again = MagicMock(), True  # as `lay_over` leaves them
    assert loop._end(10)
    loop._hand_out(11)
    assert kit.position.attempt == 0 and kit.pending.restart is None
