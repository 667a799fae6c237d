"""A run says once whether it is protected, when that is known; what a worker without `protect` dies of is not its start."""

from __future__ import annotations

import pytest

from tests.conftest import Ftrun

SCRIPT = """
import os, signal, torch, torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
dist.init_process_group("{backend}")
register_optimizer_step_post_hook(lambda *_: None)  # the script's own hook comes after ours
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if step == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""
LINES = "`job = ftrun.protect(model, optimizer)`, `for step in job.steps(n):`, `with step:`"


@pytest.mark.parametrize(
    ("backend", "lines", "options"),
    [
        ("gloo", f'four lines change that: `init_process_group("ftrun")`, {LINES}', ()),
        ("ftrun", f"three more lines change that: {LINES}", ("--worker-start", "exec")),
    ],
)
def test_a_script_that_protects_nothing(ftrun: Ftrun, backend: str, lines: str, options: tuple[str, ...]) -> None:
    script = ftrun.script(SCRIPT.format(backend=backend))
    run = ftrun.start("--nproc-per-node", 2, "--spares", 0, "--run-id", "r", *options, script)
    assert run.wait() == 1, run.stderr
    assert run.stderr.count("protected: ") == run.stderr.count("not protected: ") == 1, run.stderr
    assert f"ftrun: not protected: a death ends the run; {lines}\n" in run.stderr
    assert "root cause: rank 1 died of SIGKILL" in run.stderr and "at start-up" not in run.stderr, run.stderr
    assert [note["protected"] for note in run.journal() if note.get("note") == "protection"] == [False]
