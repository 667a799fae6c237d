"""How much of a device protect() takes: counted by the fake driver, torch's tensors included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from tests.native import fake
from tests.native.fake import Control

MIB = 1 << 20
CODE = """
import ctypes, json
import torch
from ftrun.worker.memory import gpu_memory
from ftrun.worker.memory.arena import Arena
from ftrun.worker.state.protected_state import ProtectedState
from tests.gpu.gpu_model import Gpu, QueuedSGD

driver = ctypes.CDLL("libcuda.so.1")
driver.fake_peak.restype = ctypes.c_size_t
gpu = Gpu(0, gives_back=True)
gpu_memory._GROW = 4 << 20
seen = {}
def note(name):
    gpu.synchronize()
    seen[name] = driver.fake_peak(0)
model = gpu.take(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8))))
note("model")
optimizer = QueuedSGD(model.parameters(), gpu)
state = ProtectedState([model], [optimizer], {})
arena = Arena.create(0, state.bytes_now(), state.gpu)
note("arena")
state.move_in(arena)
note("protect")
model(torch.randn(2, 1024)).square().sum().backward()
optimizer.step()
optimizer.zero_grad()
note("step")
assert state.absorb()
note("absorb")
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_the_state_is_never_there_twice(control: Control) -> None:
    """Neither the parameters while protect() moves them, nor the optimizer's state after the step that made it."""
    env = {**os.environ, **control.env, "PYTHONPATH": os.fspath(fake.ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE)], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    peak = {name: size / MIB for name, size in json.loads(done.stdout.splitlines()[-1]).items()}
    kernels = peak["arena"] - peak["model"]  # workspaces of what ftrun computes on a device
    assert peak["model"] == 32 and kernels <= 4
    one, chunk = 4, 4  # MiB of a parameter, and of one allocation
    assert peak["protect"] <= peak["model"] + kernels + one + chunk, peak
    assert peak["absorb"] <= 2 * peak["model"] + kernels + one + chunk, peak
