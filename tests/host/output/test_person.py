"""A person at the terminal of a run that trains: a debugger in one rank, a bar that goes on after a replacement."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from ftrun.core.errors import UsageError
from ftrun.worker.process.job import Job
from tests.conftest import Ftrun
from tests.host.output.ptys import Typist

TRAINS = """
import os, pdb, signal, sys, time, torch, torch.distributed as dist, ftrun
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
{above}
dist.init_process_group("ftrun")
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters())
job = ftrun.protect(ddp, optimizer)
data = torch.utils.data.DataLoader(torch.randn(80, 8), batch_size=4)
secret = 40 + job.rank
for epoch in job.epochs(2):
    for step, batch in job.batches(data, progress={progress}):
        with step:
            ddp(batch).square().mean().backward()
            if epoch == 0 and step.index == 7:
                {inside}
            optimizer.step()
            optimizer.zero_grad()
"""
STILL = 6.0  # seconds that a person thinks; the hang timeout below is far less


def script(ftrun: Ftrun, above: str, inside: str, progress: bool) -> Path:
    return ftrun.script(TRAINS.format(above=above, inside=inside, progress=progress))


@pytest.mark.parametrize("stop", [pytest.param("breakpoint()", marks=pytest.mark.slow), "dist.breakpoint(2)"])
def test_one_rank_is_debugged_and_nobody_is_blamed(ftrun: Ftrun, stop: str) -> None:
    above = "breakpoint()" if stop == "breakpoint()" else "pass"
    options = ["--nproc-per-node", "4", "--debug-rank", "2", "--hang-timeout", "2", "--heartbeat-timeout", "2"]
    person = Typist(ftrun.command(*options, script(ftrun, above, stop, False)), ftrun.base, ftrun.env)
    person.until("(Pdb)")
    if above == "breakpoint()":
        person.type("c\n")
    person.until("optimizer.step()" if stop != "dist.breakpoint(2)" else "up")
    time.sleep(STILL)
    if stop == "dist.breakpoint(2)":
        person.type("up\n")  # out of torch's own function
    person.type("p secret\n")
    person.until("42")
    person.type("c\n")
    assert person.wait(90) == 0, person.screen()
    shown = person.screen()
    assert any("done: 40 steps in " in line for line in shown[-3:]), shown
    assert not re.search("hung|froze|died|takes over|incident", "\n".join(shown)), shown


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_bar_goes_on_after_a_replacement(ftrun: Ftrun, rank: int) -> None:
    kill = (
        f"os.kill(os.getpid(), signal.SIGKILL) if job.rank == {rank} and os.environ['FTRUN_CELL'] == '{rank}' else None"
    )
    person = Typist(ftrun.command("--nproc-per-node", "2", script(ftrun, "pass", kill, True)), ftrun.base, ftrun.env)
    assert person.wait(90) == 0, person.screen()
    shown = "\n".join(person.screen())
    for epoch in (0, 1):
        assert re.search(rf"^\[rank 0\] epoch {epoch}: 100%\|.*\| 20/20 ", shown, re.M), shown
    assert f"takes over rank {rank};" in shown and "uninterrupted run: yes" in shown, shown
    counts = [int(count) for count in re.findall(rb"epoch 0: [^\r\n]*? (\d+)/20 ", person.raw)]
    if rank == 0:
        assert counts[-1] == 20 and 7 in counts and min(counts[counts.index(7) :]) == 7, (
            "it begins at the step that is done again"
        )
    assert max(counts) == 20


def test_a_bar_needs_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(UsageError, match="pip install tqdm"):
        Job(None, [], [], {}).steps(3, progress=True)


@pytest.mark.parametrize(("rank", "said"), [("4", "there are ranks 0 to 3"), ("1", "no stdin to type into")])
def test_who_cannot_be_debugged(ftrun: Ftrun, rank: str, said: str) -> None:
    done = ftrun.call("--nproc-per-node", 4, "--debug-rank", rank, ftrun.script("pass\n"))
    assert done.returncode == 2 and said in done.stderr, done.stderr
