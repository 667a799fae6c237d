"""A loop for each epoch, with an evaluation between them that communicates: weights and accuracies as under plain torchrun."""

from __future__ import annotations

import ast
import os
import subprocess

import pytest

from tests.conftest import Ftrun, Run
from tests.e2e.harness import tool

SCRIPT = """
import hashlib, os, signal, sys, torch, torch.distributed as dist, ftrun
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("ftrun")
rank, kills = dist.get_rank(), eval(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 2))
ddp = nn.parallel.DistributedDataParallel(model)
opt = torch.optim.AdamW(ddp.parameters(), lr=0.01)
data = TensorDataset(torch.randn(96, 8), torch.randint(0, 2, (96,)))
torch.manual_seed(rank)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
job = ftrun.protect(ddp, opt)

def strike(*place):
    mark = f"struck-{place}"
    if place in kills and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

found = []
for epoch in range(4):
    sampler.set_epoch(epoch)
    ddp.train()
    for step, (x, y) in job.batches(loader):
        with step:
            loss = nn.functional.cross_entropy(ddp(x), y)
            strike(epoch, step.index, rank)
            loss.backward(); opt.step(); opt.zero_grad()
    ddp.eval()
    with torch.no_grad():
        wrong = nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]) + rank
    dist.all_reduce(wrong)
    dist.barrier()
    every = [torch.zeros(3) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.rand(3))
    found.append((wrong.item(), float(sum(every).sum())))
    strike(epoch, "after", rank)
blobs = [p.detach().numpy().tobytes() for p in model.parameters()]
blobs += [v.numpy().tobytes() for p in model.parameters() for v in opt.state[p].values()]
blobs += [repr(found).encode(), torch.get_rng_state().numpy().tobytes()]
print(f"digest {rank} {hashlib.sha256(b''.join(blobs)).hexdigest()}\\n", end="", flush=True)
"""


def _digests(text: str) -> dict[str, str]:
    return dict(line.split("digest ", 1)[1].split() for line in text.splitlines() if "digest " in line)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What plain torchrun ends with."""
    folder = tmp_path_factory.mktemp("stock")
    (folder / "train.py").write_text(SCRIPT)
    for _ in range(3):  # stock torch now and then aborts while it exits
        command = [tool("torchrun"), "--standalone", "--nproc-per-node", "4", "train.py", "()"]
        ended = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=120)
        if len(_digests(ended.stdout)) == 4:
            return _digests(ended.stdout)
    raise AssertionError(ended.stderr)


def _run(ftrun: Ftrun, kills: str) -> Run:
    run = ftrun.start("--nproc-per-node", 4, ftrun.script(SCRIPT), kills)
    run.wait()
    return run


@pytest.mark.parametrize(
    "kills",
    ["((1, 2, 2),)", "((2, 0, 1), (3, 5, 1), (3, 3, 3))", "((0, 5, 0), (2, 4, 0))", "((1, 'after', 1),)"],
    ids=["second epoch", "one rank twice and another", "first and third epoch", "between two epochs"],
)
def test_killed_in_a_later_epoch(ftrun: Ftrun, stock: dict[str, str], kills: str) -> None:
    run = _run(ftrun, kills)
    assert run.process.returncode == 0, run.stderr
    assert run.stderr.count("recovered in ") == len(ast.literal_eval(kills)), run.stderr
    assert _digests(run.stdout) == stock, run.stderr
