"""A model may have parameters and buffers of no elements: they take no room, and share none with what lies beside them."""

from __future__ import annotations

from tests.conftest import Ftrun

SCRIPT = """
import hashlib, os, signal, torch, torch.distributed as dist, ftrun
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 4))
        self.linear = nn.Linear(8, 8)
        self.register_buffer("hollow", torch.empty(0))
        self.register_buffer("seen", torch.zeros(3))
    def forward(self, x):
        self.seen += 1
        return self.linear(x) + self.none.sum()

torch.manual_seed(1)
dist.init_process_group("ftrun")
model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
job = ftrun.protect(model=model, optimizer=optimizer)
for step in job.steps(8):
    with step:
        model(torch.full((4, 8), float(step.index + job.rank))).square().mean().backward()
        if os.path.exists("strike") and (job.rank, step.index, step.attempt) == (1, 4, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
state = [*model.parameters(), *model.buffers(), *(v for s in optimizer.state.values() for v in s.values())]
digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in state)).hexdigest()
print("digest", digest, flush=True)
"""


def digests(ftrun: Ftrun) -> list[str]:
    run = ftrun.start("--nproc-per-node", 4, ftrun.script(SCRIPT))
    run.wait()
    assert run.process.returncode == 0, run.stderr
    assert ("adopted in place" in run.stderr) == (ftrun.base / "strike").exists()
    return [line.split()[-1] for line in run.stdout.splitlines() if "digest" in line]


def test_a_rank_of_such_a_model_is_adopted(ftrun: Ftrun) -> None:
    clean = digests(ftrun)
    (ftrun.base / "strike").touch()
    assert digests(ftrun) == clean and len(set(clean)) == 1 and len(clean) == 4
