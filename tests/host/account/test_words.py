"""What a run says of a death that is in no step, and of logs that end with it: nothing that is not so."""

from __future__ import annotations

import os
import signal

import pytest

from ftrun.core.shared.board import Inexact
from ftrun.core.shared.moment import AFTER_LOOP, CALL, CALL_AFTER, LOOP_END, Moment, phase_from
from ftrun.core.shared.notes import DoubtNote
from ftrun.host.account import messages
from tests.conftest import Ftrun, wait_for

EPOCHS = """
import os, pathlib, signal
import torch, torch.distributed as dist, ftrun
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("ftrun")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(model=model, optimizer=opt)

def die(where):
    mark = pathlib.Path(where)
    if job.rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

def evaluate():
    die("call")
    dist.all_reduce(torch.ones(1))

for epoch in job.epochs(2):
    for step in job.steps(3):
        with step:
            model(torch.ones(2, 4)).sum().backward()
            opt.step()
            opt.zero_grad()
    job.call(evaluate)
die("tail")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("moment", "short", "long"),
    [
        (Moment("idle", 12), "before step 12", "before step 12 began"),
        (Moment("backward", 8, 3, 40), "in backward of epoch 3, step 8 of 40", "in the backward pass of epoch 3, step 8 of 40"),
        (Moment("gate", 12), "at the gate of step 12", "at the gradient synchronization barrier of step 12"),
        (Moment("done", 12), "after the update of step 12", "after the optimizer step of step 12"),
        (Moment(CALL, 12), "in job.call before step 12", "in the evaluation (job.call) before step 12"),
        (Moment(CALL_AFTER, 25, 0, 25), "in job.call after epoch 0", "in the evaluation (job.call) after epoch 0"),
        (Moment(LOOP_END, 25, None, 25), "at the end of the loop", "at the end of the loop"),
        (Moment(AFTER_LOOP, 25, 1, 25), "after epoch 1", "after epoch 1"),
        (Moment("start", None), "", "while its script started"),
    ],
)
def test_where_a_rank_was(moment: Moment, short: str, long: str) -> None:
    assert (moment.words(), moment.words(long=True)) == (short, long)


def test_a_step_index_behind_the_last_step_is_no_step() -> None:
    """The board counts on: the place of a call after 25 steps is 25."""
    idle, gate, done = 1, 4, 6
    assert [phase_from(phase, 0, 26, 25) for phase in (idle, gate, done)] == [CALL_AFTER, LOOP_END, AFTER_LOOP]
    assert [phase_from(phase, 0, 25, 25) for phase in (idle, gate, done)] == ["idle", "gate", "done"]


def test_deaths_that_are_in_no_step(ftrun: Ftrun) -> None:
    run = ftrun.start("--nproc-per-node", 2, "--run-id", "told", ftrun.script(EPOCHS))
    assert run.wait() == 0, run.stderr
    assert "ftrun: rank 1 died in job.call after epoch 0 (SIGKILL" in run.stderr
    assert "takes over rank 1; job.call after epoch 0 again; " in run.stderr
    assert ", job.call " in next(line for line in run.stderr.splitlines() if "recovered in" in line)
    assert "ftrun: rank 1 died after epoch 1 (SIGKILL" in run.stderr
    assert "takes over rank 1; going on with what comes after epoch 1\n" in run.stderr
    assert "ftrun: 2 incidents, 0 steps done again, " in run.stderr
    call, tail = (" ".join(ftrun.call("timeline", "told", "--incident", number).stdout.split()) for number in (1, 2))
    assert "what failed rank 1, in the evaluation (job.call) after epoch 0 why" in call
    assert "job.call after epoch 0 was made again, and no step; all finished steps are kept (0 to 2)" in call
    assert "what failed rank 1, after epoch 1 why" in tail and "nobody was stopped: the new worker did what comes after" in tail
    events = ftrun.call("events", "told").stdout
    assert "died in job.call after the loop: SIGKILL" in events and "{" not in events, events


def test_logs_that_end_with_the_run_are_not_pointed_at(ftrun: Ftrun) -> None:
    (ftrun.base / "file").write_text("")
    run = ftrun.start("--nproc-per-node", 2, "--log-dir", "file/logs", ftrun.script(EPOCHS), logs=False)
    assert run.wait() == 0, run.stderr
    assert "they end with the run" in run.stderr and "2 incidents, " in run.stderr
    assert "ftrun timeline" not in run.stderr and "nothing is left to draw them from (its logs are gone with the run" in run.stderr


HELD = """
import os, time
import torch, torch.distributed as dist, ftrun
dist.init_process_group("ftrun")
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
job = ftrun.protect(model=model, optimizer=opt)
for step in job.steps(2):
    with step:
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
print("evaluates", flush=True)
job.call(lambda: time.sleep(60))
"""


def test_a_spare_that_is_killed_a_long_call_and_control_c(ftrun: Ftrun) -> None:
    run = ftrun.start("--nproc-per-node", 1, "--run-id", "held", ftrun.script(HELD))
    run.wait_output("evaluates")
    wait_for(lambda: "worker 1 is ready as a spare" in ftrun.call("events", "held").stdout, "the spare")
    os.kill(run.pid("ftrun spare 1"), signal.SIGKILL)
    run.wait_output("ftrun: spare 1 ended (SIGKILL); no rank was lost, and another spare starts")
    status = ftrun.call("status", "held", "--once").stdout
    assert " call after loop " in status and "in job.call" not in status, status
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    assert "ftrun: rank 0, in job.call after the loop: KeyboardInterrupt\n" in run.stderr, run.stderr


def test_buffers_that_were_lost_are_not_said_to_be_on_a_device() -> None:
    (_, line) = messages.summary("brave-otter", 1, True, 0, 1, 0.5, Inexact.BUFFERS_FROM_PEER, [])
    assert line.endswith("[ftrun explain F406]") and "lost with its memory" in line and "device" not in line


def told(why: Inexact, cell: int, step: int, epoch: int | None = None, names: tuple[str, ...] = (), phase: str = "forward") -> DoubtNote:
    return DoubtNote(cell, why, Moment(phase, step, epoch, 40), names)


def test_the_closing_line_says_since_when_by_the_rank_that_saw_it_first() -> None:
    inputs, buffers = Inexact.OTHER_INPUTS, Inexact.BUFFERS_UNKNOWN
    seen = [told(inputs, 1, 3, 2), told(inputs, 0, 8, 1), told(buffers, 4, 9, 1, ("seen",)), told(buffers, 5, 9, 1, ("mean",))]
    (_, line) = messages.summary("brave-otter", 2, True, 0, 1, 0.5, inputs | buffers, ["it"], seen)
    no, unknown, left = line.partition("run: ")[2].split("; ")
    assert no == "no (since epoch 1, step 8 of 40: a step that was done again got other inputs than the first time"
    assert unknown.startswith("since epoch 1, step 9 of 40: buffers ") and unknown.endswith(": mean, seen")
    assert left == "not kept, and what it feeds may differ: it) [ftrun explain F407]"


def test_what_a_comparison_finds_was_seen_there_and_came_about_before() -> None:
    seen = [told(Inexact.REPLICAS_DIFFER, 0, 40, phase=LOOP_END)]
    (_, line) = messages.summary("brave-otter", 1, True, 0, 1, 0.5, Inexact.REPLICAS_DIFFER, [], seen)
    assert "run: no (seen at the end of the loop: ranks that should hold the same differ)" in line


def test_a_worker_that_had_no_room_for_its_file_costs_the_place_and_nothing_else() -> None:
    (_, line) = messages.summary("brave-otter", 1, True, 0, 1, 0.5, Inexact.OTHER_INPUTS, [], [])
    assert "run: no (a step that was done again got other inputs than the first time)" in line


def test_the_end_for_want_of_exactness_says_whose_it_is() -> None:
    seen = [told(Inexact.UPDATE_USED_RNG, 5, 7)]
    line = messages.inexact([2], Inexact.UPDATE_USED_RNG, seen, {0: {"it": ""}, 5: {"best": "", "it": ""}, 9: {"it": ""}}, {0: 0, 5: 2}.get)
    assert line.startswith("the repair of rank 2 cannot be called exact: since step 7: random numbers "), line
    assert "may lack some, on rank 2; not kept, and what it feeds may differ: best, it, on ranks 0, 2; the" in line
    assert line.endswith("start it again, from its last checkpoint [ftrun explain F408]")
