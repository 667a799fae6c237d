"""Collectives that take seconds where steps take milliseconds: much data, a slow network. No fault, and nobody to blame."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.truth import harness
from tests.truth.harness import PRELUDE, under_ftrun

# in step 8 a reduction of about three seconds; with "call" rank 1 dies in a job.call before it
SCRIPT = """
import os, signal, time
from pathlib import Path
ddp = DDP(net())
opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)
big = torch.zeros(20_000_000)
dist.all_reduce(big[:2_000_000])
begin = time.monotonic()
dist.all_reduce(big[:2_000_000])
many = torch.tensor(4 / (10 * (time.monotonic() - begin)))
dist.broadcast(many, 0)
many = max(20, min(100, int(many)))
job = ftrun.protect(ddp, opt, ignore=["big"])
died = Path(os.environ["TRUTH_OUT"]).with_name("died")

def evaluate():
    for i in range(3):
        dist.all_reduce(torch.ones(1))
        if i == 1 and rank == 1 and "{how}" == "call" and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

for step in job.steps(STEPS):
    if step.index == 8:
        job.call(evaluate)
    with step:
        time.sleep(0.03)
        x, y = data(step.index)
        if step.index == 8:
            begin = time.monotonic()
            for work in [dist.all_reduce(big, async_op=True) for _ in range(many)]:
                work.wait()
            print("took", time.monotonic() - begin, flush=True)
        loss_of(ddp(x), y).backward()
        opt.step()
        opt.zero_grad()
end(model=ddp, opt=opt)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "answer"), [("clean", "no incident"), ("call", "yes")])
def test_a_collective_of_seconds_is_no_fault(folder: Path, how: str, answer: str) -> None:
    script = folder / "train.py"
    script.write_text(PRELUDE + SCRIPT.replace("{how}", how))
    seen = under_ftrun(folder, script)
    assert (seen.code, seen.answer) == (0, answer), seen.output[-3000:]
    assert len(seen.ranks) == harness.RANKS and len({str(found) for found in seen.ranks.values()}) == 1
    assert seen.output.count("took ") >= harness.RANKS
    assert "making all connections" not in seen.output and "hung" not in seen.output, seen.output[-3000:]
