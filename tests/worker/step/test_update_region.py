"""An exception where a replacement would never run the code again (after the update, after a body, after the loop) ends the run."""

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
AFTER
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print("digest", digest, flush=True)
"""
ONCE = "job.rank == 2 and step.index == 3 and not os.path.exists('struck-2')"
SWALLOW = """try:
        body(step)
    except ValueError:
        pass"""


def run(ftrun: Ftrun, condition: str, body: str = "body(step)", restarts: int = 0, after: str = "") -> Run:
    script = ftrun.script(SCRIPT.replace("CONDITION", condition).replace("BODY", body).replace("AFTER", after))
    started = ftrun.start("--nproc-per-node", 4, "--max-restarts", restarts, script)
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


@pytest.mark.parametrize("body", ["body(step)", SWALLOW], ids=["let out", "swallowed"])
def test_one_rank_raises_after_its_update(ftrun: Ftrun, body: str) -> None:
    """Under torchrun that ends the run as well."""
    ended = run(ftrun, ONCE, body)
    assert ended.process.returncode == 1, ended.stderr
    line = next(n for n, text in enumerate((ftrun.base / "train.py").read_text().splitlines(), 1) if "raise " in text)
    named = f"ValueError at {ftrun.base / 'train.py'}:{line}"
    assert "rank 2, step 3: ValueError: flaky log" in ended.stderr, "the exception itself comes first"
    assert f"root cause: rank 2 raised {named}" in ended.stderr
    assert "bit-identical" not in ended.stderr and "takes over" not in ended.stderr
    assert ("the script goes on after an exception" in ended.stderr) == (body == SWALLOW)


@pytest.mark.parametrize(
    ("body", "after", "place"),
    [
        ("body(step)\n    if job.rank == 2 and step.index == 3: raise OSError('no room')", "", "after the body"),
        ("body(step)", "if job.rank == 2: raise OSError('no room')", "after the loop"),
    ],
    ids=["after a body", "after the loop"],
)
def test_a_checkpoint_that_cannot_be_written_ends_the_run(ftrun: Ftrun, body: str, after: str, place: str) -> None:
    """A replacement would not write it either, and nobody would hear of it."""
    ended = run(ftrun, "False", body, after=after)
    assert ended.process.returncode == 1, ended.stderr
    assert "OSError: no room" in ended.stderr
    root = next(line for line in ended.stderr.splitlines() if "root cause" in line)
    assert "rank 2 raised OSError at " in root
    assert place in ended.stderr
    assert "bit-identical" not in ended.stderr and "takes over" not in ended.stderr


@pytest.mark.slow
def test_all_restart_where_that_is_allowed(ftrun: Ftrun, clean: set[str]) -> None:
    ended = run(ftrun, ONCE, restarts=1)
    assert ended.process.returncode == 0, ended.stderr
    assert digests(ended) == clean
    assert "bit-identical to an uninterrupted run: not known" in ended.stderr


def test_every_rank_raises_after_its_update(ftrun: Ftrun) -> None:
    """Nobody has the state any more: the run ends, and the exception is the root cause, not its consequences."""
    ended = run(ftrun, "step.index == 3")
    assert ended.process.returncode == 1
    root = next(line for line in ended.stderr.splitlines() if "root cause" in line)
    assert "raised ValueError at " in root, ended.stderr
    assert ended.stderr.count("also failed") == 0, ended.stderr
