"""Mistakes in the training script: what is said, to whom, with which exit code; and what one may catch and go on after.

Refusals share runs where they can: the scripts print what they were refused, the tests read it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Ftrun, Run

HEAD = """
import sys, torch, torch.distributed as dist, ftrun
from torch.nn.parallel import DistributedDataParallel as DDP

def refused(what, call):
    try:
        call()
    except ftrun.UsageError as error:
        print(f"{what}: {error}", flush=True)
    else:
        print(f"{what}: not refused", flush=True)

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
PROTECT = """
dist.init_process_group("ftrun")
ddp = DDP(model)
job = ftrun.protect(model=ddp, optimizer=optimizer)
"""
BODY = """
ddp(torch.ones(2, 4)).sum().backward()
optimizer.step()
optimizer.zero_grad()
"""


def indent(text: str, by: int = 8) -> str:
    return "".join(" " * by + line + "\n" for line in text.strip().splitlines())


def run(ftrun: Ftrun, text: str, *options: object) -> Run:
    started = ftrun.start("--nproc-per-node", 2, "--spares", 0, *options, ftrun.script(text))
    started.wait()
    return started


def said(run: Run, what: str) -> str:
    """What both ranks were told at `what`; the same for both."""
    told = re.findall(rf"^\[rank [01]\] {re.escape(what)}: (.*)$", run.stdout, re.M)
    assert len(told) == 2 and told[0] == told[1], (what, told, run.stderr)
    return str(told[0])


def line_of(run: Run, text: str) -> str:
    """file:line of the only line of the script that holds `text`."""
    script: Path = run.base / "train.py"
    (number,) = [n for n, line in enumerate(script.read_text().splitlines(), 1) if text in line]
    return f"{script}:{number}"


def ended_by(run: Run, kind: str, code: int = 2) -> str:
    """The run ended at once with an error of ours: shown once a rank, named in the last line, nobody tried again."""
    assert run.process.returncode == code, run.stderr
    assert re.search(rf"ftrun: rank [01] failed: {kind} at .*train\.py:\d+$", run.stderr, re.M), run.stderr
    assert "again" not in run.stderr and "recovered" not in run.stderr
    shown = re.findall(rf"^\[rank ([01])\] ftrun: rank \1(?:, step \d+)?: {kind}: (.*)$", run.stderr, re.M)
    assert shown and len({rank for rank, _ in shown}) == len(shown), run.stderr
    return str(shown[0][1])


TEACHER = HEAD + """
from torch.distributed.algorithms import Join
dist.init_process_group("ftrun")
ddp, teacher = DDP(model), torch.nn.Bilinear(2, 2, 1).requires_grad_(False)
job = ftrun.protect([ddp, teacher], optimizer)
with Join([ddp]):
    for step in job.steps(3):
        with step:
""" + indent(BODY, 12)


def test_a_model_without_a_replica_is_named_at_start_and_join_by_its_name(ftrun: Ftrun) -> None:
    started = run(ftrun, TEACHER)
    assert ended_by(started, "UsageError").startswith("torch.distributed.algorithms.Join lets ranks take different numbers")
    told = re.findall(r"no other rank is known to hold the same values of (.*): a rank that dies in its update", started.stderr)
    assert told == ["Bilinear (model 1)"], started.stderr
    assert "replicas=torch.distributed.group.WORLD" in started.stderr and "[ftrun explain F397]" in started.stderr


SAM = HEAD + PROTECT + """
for step in job.steps(3):
    with step:
        ddp(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            old = [p.clone() for p in model.parameters()]
            for p in model.parameters():
                p.data.add_(0.05 * p.grad)
        optimizer.zero_grad()
        ddp(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            for p, was in zip(model.parameters(), old):
                p.data.copy_(was)
        optimizer.step()
"""


def test_weights_that_are_moved_and_brought_back_before_the_gate(ftrun: Ftrun) -> None:
    """At the gate they are as they were, but a step that is done again would begin with those of its second forward."""
    started = run(ftrun, SAM)
    assert ended_by(started, "UsageError").startswith("parameters were moved between two forwards of one step")
    assert "Make it two steps" in started.stderr and "[ftrun explain F396]" in started.stderr


def test_what_protect_refuses(ftrun: Ftrun) -> None:
    script = f"""{HEAD}
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

class Config:
    def state_dict(self):
        return {{"lr": 1, "path": object()}}
    def load_state_dict(self, state):
        pass

class ZeroRedundancyOptimizer(torch.optim.SGD):
    pass

def protect(**given):
    return lambda: ftrun.protect(**{{"model": model, "optimizer": optimizer, **given}})

refused("before", protect())
dist.init_process_group("ftrun")
refused("no parameters", protect(model=torch.nn.ReLU()))
refused("devices", protect(model=[model, torch.nn.Linear(2, 2, device="meta")]))
refused("device", protect(model=torch.nn.Linear(2, 2, device="meta")))
refused("model", protect(model="gpt"))
refused("optimizer", protect(optimizer=model))
refused("swapped", protect(model=optimizer, optimizer=model))
refused("stateful", protect(sampler=iter(())))
refused("zero", protect(optimizer=ZeroRedundancyOptimizer(model.parameters(), lr=0.1)))
refused("static", protect(model=DDP(model, static_graph=True)))
hooked = DDP(model)
hooked.register_comm_hook(None, allreduce_hook)
refused("hook", protect(model=hooked))
refused("kept", protect(config=Config()))
ftrun.protect(model=DDP(model), optimizer=optimizer)
ftrun.protect(model=model, optimizer=optimizer)
"""
    ended = run(ftrun, script)
    assert 'protect() before init_process_group("ftrun")' in said(ended, "before")
    assert "the model has no parameters" in said(ended, "no parameters")
    assert "on several devices (cpu, meta); put each rank's model on one" in said(ended, "devices")
    assert "models on meta are not supported" in said(ended, "device")
    assert said(ended, "model") == "protect(model=...): expected Module, got str"
    assert said(ended, "optimizer") == "protect(optimizer=...): expected Optimizer, got Linear"
    assert said(ended, "swapped") == "protect(model=...): expected Module, got SGD"
    assert (
        said(ended, "stateful") == "protect(sampler=...): tuple_iterator objects have no state_dict()/load_state_dict()"
    )
    assert said(ended, "zero").startswith("ZeroRedundancyOptimizer communicates in step()")
    assert "use static_graph=False" in said(ended, "static")
    assert "remove register_comm_hook" in said(ended, "hook")
    assert said(ended, "kept").startswith("config.state_dict().path holds a builtins.object, which cannot be kept")
    assert "protect() was called before" in ended_by(ended, "UsageError")


def test_gloo_group_is_refused(ftrun: Ftrun) -> None:
    script = f'{HEAD}\ndist.init_process_group("gloo")\nftrun.protect(model=DDP(model), optimizer=optimizer)\n'
    message = ended_by(run(ftrun, script), "UsageError")
    assert message.startswith('protect() needs init_process_group("ftrun"), and this script made a "gloo" group')


def test_what_the_loop_refuses_and_training_goes_on(ftrun: Ftrun) -> None:
    """Everything that is refused can be caught: the run goes on, and ends as if it had not been tried."""
    tensor = "torch.ones(1)"
    script = f"""{HEAD}{PROTECT}
steps = job.steps(4)
refused("update outside", optimizer.step)
for step in steps:
    if step.index == 0:
        refused("communicate outside", lambda: dist.all_reduce({tensor}))  # outside
        refused("new group", lambda: dist.new_group([0, 1]))
    with step:
        if step.index == 1:
            refused("nested", step.__enter__)
            refused("loop in a body", lambda: next(iter(job.steps(1))))
            refused("call in a body", lambda: job.call(print))
            refused("committed in a body", lambda: step.committed)
        ddp(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if step.index == 2:
            refused("communicate after", lambda: dist.all_reduce({tensor}))  # after
        optimizer.zero_grad()
    if step.index == 2:
        refused("load late", lambda: job.load("x"))
        refused("state late", lambda: job.state(x=1))
        refused("state of a function", lambda: job.state("nowhere"))
        refused("entered twice", step.__enter__)
print("end:", model.weight.sum().item(), flush=True)
"""
    ended = run(ftrun, script)
    assert ended.process.returncode == 0, ended.stderr
    assert said(ended, "update outside") == "optimizer.step() of a protected optimizer outside `with step:`"
    outside, after = line_of(ended, "# outside"), line_of(ended, "# after")
    assert said(ended, "communicate outside").startswith(
        f"allreduce outside `with step`, at {outside}: communicate in the body before optimizer.step(), or in job.call(fn)"
    )
    assert said(ended, "communicate after").startswith(
        f"allreduce after the gate, at {after}: communicate before optimizer.step()"
    )
    assert said(ended, "new group").startswith("make process groups before the first step")
    assert "was entered twice" in said(ended, "nested")
    assert said(ended, "loop in a body") == "job.steps was asked for inside the body of step 1; leave it first"
    assert "job.call inside `with step`" in said(ended, "call in a body")
    assert said(ended, "committed in a body").startswith("step.committed inside the body of step 1: it is known after")
    assert said(ended, "state late") == "job.state after the first step; call it before the first loop"
    assert said(ended, "state of a function").startswith("job.state: nowhere: no global variable of this script")
    assert said(ended, "load late") == "job.load after the first step; load before the loop"
    assert "step 2 was entered twice" in said(ended, "entered twice")
    said(ended, "end")


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        pytest.param(
            "for step in job.steps(3):\n    if step.index == 0:\n        with step:\n" + indent(BODY, 12),
            "step 1 was taken from the loop, but its `with step:` was skipped",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "steps = job.steps(3)\nstep = next(steps)\nwith step:\n    with next(steps):\n" + indent(BODY),
            "the next step was asked for inside the body of step 0; leave it first",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "for step in job.steps(3):\n    with step:\n"
            + indent("for p in model.parameters(): p.data.add_(1)\n" + BODY),
            "parameters or optimizer state changed between the start of the step and its gate",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "for step in job.steps(3):\n    with step:\n"
            + indent(BODY + "for p in model.parameters(): p.data = p.data.clone()\n"),
            "parameter module.weight was given other memory (param.data = ...), which ftrun does not keep",
        ),
        (
            "for step in job.steps(3):\n    with step:\n" + indent(BODY + "dist.barrier()"),
            "barrier after the gate, at ",
        ),
    ],
    ids=["skipped", "nested", "hidden-update", "other-memory", "communicates-after"],
)
def test_a_mistake_in_the_loop_ends_the_run_at_once(ftrun: Ftrun, loop: str, message: str) -> None:
    assert message in ended_by(run(ftrun, f"{HEAD}{PROTECT}\n{loop}", "--max-restarts", 2), "UsageError")


RAISES = """
for step in job.steps(4):
    with step:
        if step.index == 2 and dist.get_rank() == 1 and {when}:
            raise ValueError("bad batch")
"""


def test_exception_is_retried_once_in_place(ftrun: Ftrun) -> None:
    script = HEAD + PROTECT + RAISES.format(when="step.attempt == 0") + indent(BODY) + 'print("attempt", step.attempt)'
    ended = run(ftrun, script)
    assert ended.process.returncode == 0, ended.stderr
    where = line_of(ended, "raise ValueError")
    assert "[rank 1] ftrun: rank 1, step 2: ValueError: bad batch" in ended.stderr
    assert f"rank 1 raised ValueError at {where} in step 2; everyone does the step again" in ended.stderr
    assert "recovered in" in ended.stderr and "bit-identical to an uninterrupted run: yes" in ended.stderr


LOADER = """
import multiprocessing, os, signal
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
data = TensorDataset(torch.ones(24, 4))
loader = DataLoader(data, batch_size=1, sampler=DistributedSampler(data), num_workers=1)
DIES = {2: 0, 5: 1, 8: 1}
for step, (x,) in job.batches(loader, epochs=1):
    with step:
        if DIES.get(step.index) == dist.get_rank() and not os.path.exists(f"died-{step.index}"):
            open(f"died-{step.index}", "w").close()
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGKILL)
                child.join()
        ddp(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_loader_process_that_is_killed_steps_later_is_counted(ftrun: Ftrun) -> None:
    """By the kernel, say, which runs out of memory: on another rank, then on the same one again."""
    ended = run(ftrun, HEAD + PROTECT + LOADER, "--max-replacements", 2)
    assert ended.process.returncode == 0, ended.stderr
    assert ended.stderr.count("takes over rank 1") == 2 and ended.stderr.count("takes over rank 0") == 1, ended.stderr
    assert "bit-identical to an uninterrupted run: yes" in ended.stderr


def test_exception_that_comes_again_ends_the_run(ftrun: Ftrun) -> None:
    ended = run(ftrun, HEAD + PROTECT + RAISES.format(when="True") + indent(BODY), "--spares", 1)
    assert ended.process.returncode == 1, ended.stderr
    own = [line for line in ended.stderr.splitlines() if "OMP_NUM_THREADS" not in line and "protected: " not in line][1:]
    assert own[0] == "[rank 1] ftrun: rank 1, step 2: ValueError: bad batch"
    assert any("[rank 1] ValueError: bad batch" in line for line in own)
    where = line_of(ended, "raise ValueError")
    assert f"ftrun: rank 1 raised ValueError at {where} in step 2 again after a retry; the run ends [ftrun explain F403]" in own
    assert ended.stderr.count("Traceback (most recent call last)") == 1, "the same one is not shown again"
    assert "[rank 1] ftrun: rank 1, step 2: ValueError: bad batch (with the same traceback as before)" in own
    assert any("had every rank do the step again, then gave up" in line for line in own)
    assert "takes over" not in ended.stderr, "a spare was spent on the program's own mistake"
