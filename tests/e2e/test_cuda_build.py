"""A CUDA build of torch that sees a device: what a GPU machine does to processes that are forked, without a GPU.

The tests need a build of torch with CUDA, as pip brings it; on a CPU build they are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.conftest import ROOT, Ftrun
from tests.e2e import harness
from tests.e2e.conftest import Reference
from tests.e2e.harness import kill

HERE = Path(__file__).resolve().parent
SGD = ("--optim", "sgdm", "--steps", "8")  # Adam's step opens CUDA, under torchrun too
pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch was built without CUDA")


@pytest.fixture
def one_gpu(tmp_path: Path) -> dict[str, str]:
    """Variables of a process in which the CUDA runtime says that there is one GPU."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "the pretended GPU needs a C compiler"
    stub = tmp_path / "one_gpu.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(stub), str(HERE / "one_gpu.c")], check=True)
    return {"LD_PRELOAD": str(stub)}


PLAIN = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
threads = [open(f"/proc/self/task/{t}/comm").read() for t in __import__("os").listdir("/proc/self/task")]
print("autograd has device threads:", any(name.startswith("pt_autograd_") for name in threads), flush=True)
print("trained", flush=True)
time.sleep(1.0)
"""


@pytest.mark.parametrize("start", ["forkserver", "exec"])
def test_a_plain_script_trains_in_each_start_mode(ftrun: Ftrun, one_gpu: dict[str, str], start: str) -> None:
    run = ftrun.start("--nproc-per-node", 2, "--worker-start", start, ftrun.script(PLAIN), **one_gpu)
    run.wait_output("trained")
    fork_server = Path(f"/proc/{run.pid('ftrun forksrv')}")
    threads = [(task / "comm").read_text() for task in (fork_server / "task").iterdir()]
    assert not [name for name in threads if name.startswith("pt_autograd_")], "the fork server ran a backward"
    assert "libcuda.so" not in (fork_server / "maps").read_text(), "the fork server opened the CUDA driver"
    assert run.wait() == 0, run.stderr
    assert run.stdout.count("trained") == 2
    assert run.stdout.count("autograd has device threads: True") == 2, (
        "the pretended GPU was not seen: this proves nothing"
    )
    assert "fresh interpreter" not in run.stderr, run.stderr


@pytest.mark.parametrize("start", ["forkserver", "exec"])
def test_a_protected_script_ends_equal_after_kills(
    tmp_path: Path, stock: Reference, one_gpu: dict[str, str], start: str
) -> None:
    faults = (kill(2, "backward", 2), kill(1, "update", 4), kill(0, "forward", 6))
    options = ("--max-replacements", "50", "--worker-start", start)
    outcome = harness.ftrun(tmp_path, SGD, faults, options=options, env=one_gpu)
    harness.same(stock(*SGD), outcome)
    assert len(harness.deaths(outcome)) == 3, outcome.tail()
    assert "fresh interpreter" not in outcome.output
    harness.check_no_strays(tmp_path)


ONE_RANK = """
import torch, torch.distributed as dist, ftrun
dist.init_process_group("ftrun")
print("NCCL is", dist.group.WORLD._get_backend(torch.device("cuda")).name(), flush=True)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job = ftrun.protect(model=model, optimizer=optimizer)
for step in job.steps(6):
    with step:
        model(torch.ones(4, 8)).square().mean().backward()
        if (step.index, step.attempt) == (3, 0):
            raise ValueError("once")
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
print("trained", flush=True)
"""


def test_a_group_of_the_real_nccl_library_is_aborted_and_made_again(ftrun: Ftrun, one_gpu: dict[str, str]) -> None:
    """The older class opens no device before its first collective; the newer one does when it is made, and needs a driver."""
    env = {**one_gpu, "TORCH_DIST_USE_NCCL2": "0"}
    run = ftrun.start("--nproc-per-node", 1, ftrun.script(ONE_RANK), **env)
    assert run.wait() == 0, run.stderr
    assert "NCCL is nccl\n" in run.stdout and "trained" in run.stdout
    assert "everyone does the step again" in run.stderr


CHOICE = """
import torch.distributed as dist
from datetime import timedelta
from ftrun.worker.torch_compat import torch_private
for kind in ("_create_nccl_process_group", "_create_nccl2_process_group"):
    if hasattr(dist.distributed_c10d, kind):
        setattr(dist.distributed_c10d, kind, lambda options, _, kind=kind: (kind, options.group_size))
print(torch_private.nccl(dist.HashStore(), 0, 1, timedelta(seconds=5), None))
"""


@pytest.mark.skipif(
    not hasattr(torch.distributed.distributed_c10d, "_create_nccl2_process_group"),
    reason="this torch has one class for NCCL",
)
@pytest.mark.parametrize(
    ("choice", "made"),
    [
        ("0", "_create_nccl_process_group"),
        # torch 2.14 has the newer class, and "nccl" means the older one there
        ("", f"_create_{'nccl2' if TorchVersion(torch.__version__) >= (2, 15) else 'nccl'}_process_group"),
    ],
)
def test_nccl_is_the_class_that_the_user_of_torchrun_runs(choice: str, made: str) -> None:
    env = {**os.environ, "TORCH_DIST_USE_NCCL2": choice}
    done = subprocess.run([sys.executable, "-c", CHOICE], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"('{made}', 1)\n", done.stderr
