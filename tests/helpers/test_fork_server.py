"""The fork server imports and does nothing else; where an import does more, workers start by exec, and the run says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Ftrun
from tests.native.fake import Control

TRAINS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
model(torch.ones(2, 4)).sum().backward()
print("trained", flush=True)
"""
OPENS_CUDA = """
import ctypes
def opened():
    assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
"""


@pytest.fixture
def environment(ftrun: Ftrun, tmp_path: Path) -> dict[str, str]:
    """Variables of a process that finds a CUDA driver, and packages of the user's in `packages`."""
    control = Control(tmp_path / "control")
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "opens_cuda.py").write_text(OPENS_CUDA)
    return {**control.env, "PYTHONPATH": f"{packages}:{ftrun.env['PYTHONPATH']}"}


def _trains(ftrun: Ftrun, environment: dict[str, str]) -> str:
    run = ftrun.start("--nproc-per-node", 2, "--spares", 1, ftrun.script(TRAINS), **environment)
    assert run.wait() == 0, run.stderr
    assert run.stdout.count("trained") == 2
    ready = [line for line in run.journal() if line.get("note") == "service" and line["service"] == "fork server"]
    assert len(ready) == 1, "a fork server that begins anew is the same process, and no incident"
    return run.stderr


def test_nothing_is_said_where_nothing_is_wrong(ftrun: Ftrun, environment: dict[str, str]) -> None:
    assert "fresh interpreter" not in _trains(ftrun, environment)


def test_a_plugin_of_torch_that_opens_the_driver(ftrun: Ftrun, environment: dict[str, str], tmp_path: Path) -> None:
    """torch loads the entry points of "torch.backends" of every installed package when it is imported."""
    metadata = tmp_path / "packages" / "opens_cuda-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: opens-cuda\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nopens_cuda = opens_cuda:opened\n")
    said = _trains(ftrun, environment)
    assert said.count("importing torch initialized the CUDA driver") == 1, said
    assert "each worker starts as a fresh interpreter" in said


def test_a_sitecustomize_that_opens_the_driver(ftrun: Ftrun, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "packages" / "sitecustomize.py").write_text("import opens_cuda\nopens_cuda.opened()\n")
    said = _trains(ftrun, environment)
    assert (
        said.count("starting Python (a sitecustomize, or a .pth file of an installed package) initialized the CUDA")
        == 1
    )
    assert "each worker starts as a fresh interpreter" in said
