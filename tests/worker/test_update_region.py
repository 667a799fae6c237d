"""An exception after the update began: the step counts, the rank gets another worker, and a person reads what it cost."""

from __future__ import annotations

import pytest

from tests.conftest import Ftrun, Run

SCRIPT = """
import os, sys, hashlib, torch, torch.distributed as dist, ftrun
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
dist.init_process_group("ftrun")
ddp = torch.nn.parallel.DistributedDataParallel(model)
opt = torch.optim.Adam(ddp.parameters())
job = ftrun.protect(model=ddp, optimizer=opt)

def log(step):
    if os.path.exists("calm"):
        return
    if CONDITION:
        open(f"struck-{job.rank}", "w").close()
        raise ValueError("flaky log")

def body(step):
    with step:
        ddp(torch.full((2, 4), 1.0 + job.rank + step.index)).sum().backward()
        opt.step(); opt.zero_grad()
        log(step)

for step in job.steps(8):
    BODY
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print("digest", digest, flush=True)
"""
ONCE = "job.rank == 2 and step.index == 3 and not os.path.exists('struck-2')"
SWALLOW = """try:
        body(step)
    except ValueError:
        pass"""


def run(ftrun: Ftrun, condition: str, body: str = "body(step)") -> Run:
    script = ftrun.script(SCRIPT.replace("CONDITION", condition).replace("BODY", body))
    started = ftrun.start("--nproc-per-node", 4, script)
    started.wait()
    return started


def digests(run: Run) -> set[str]:
    found = [line.split()[-1] for line in run.stdout.splitlines() if "digest" in line]
    assert len(found) == 4, run.stdout + run.stderr
    return set(found)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    base = tmp_path_factory.mktemp("clean")
    (base / "calm").touch()
    return digests(run(Ftrun(base), "False"))


@pytest.mark.slow
@pytest.mark.parametrize("body", ["body(step)", SWALLOW], ids=["let out", "swallowed"])
def test_one_rank_raises_after_its_update(ftrun: Ftrun, clean: set[str], body: str) -> None:
    ended = run(ftrun, ONCE, body)
    assert ended.process.returncode == 0, ended.stderr
    assert digests(ended) == clean
    line = next(n for n, text in enumerate((ftrun.base / "train.py").read_text().splitlines(), 1) if "raise " in text)
    named = f"ValueError at {ftrun.base / 'train.py'}:{line}"
    assert "rank 2, step 3: ValueError: flaky log" in ended.stderr, "the exception itself comes first"
    assert f"ftrun: rank 2 died in update of step 3 ({named}" in ended.stderr
    *_, note = ended.stderr.splitlines()
    assert note.startswith(f"ftrun: rank 2 raised {named} in the update of step 3: the step counts"), ended.stderr
    assert ("the script goes on after an exception" in ended.stderr) == (body == SWALLOW)
    deaths = [e for e in (n.get("event", {}) for n in ended.journal()) if e.get("kind") == "Died" and e["step"] == 3]
    assert [(d["worker"], d["code"] or 1, d["fault"]) for d in deaths] == [(2, 1, "exception")]


@pytest.mark.slow
def test_it_comes_again_in_the_next_step(ftrun: Ftrun) -> None:
    ended = run(ftrun, "job.rank == 2 and step.index >= 3")
    assert ended.process.returncode == 1
    assert "ftrun: rank 2 failed a second time in the same way (ValueError at " in ended.stderr
    assert ended.stderr.count("is now") == 1, "one worker was spent on it, no more"


def test_every_rank_raises_after_its_update(ftrun: Ftrun) -> None:
    """Nobody has the state any more: the run ends, and the exception is the root cause, not its consequences."""
    ended = run(ftrun, "step.index == 3")
    assert ended.process.returncode == 1
    root = next(line for line in ended.stderr.splitlines() if "root cause" in line)
    assert "raised ValueError at " in root, ended.stderr
    assert ended.stderr.count("also failed") == 0, ended.stderr
