"""What the first use of a GPU costs a process, in ms by part; those that a spare makes beforehand come first."""

from __future__ import annotations

import json
import tempfile
import time

import torch
import torch.distributed as dist

from ftrun.native import cuda

found: dict[str, float] = {}
last = time.perf_counter()


def note(name: str) -> None:
    global last
    now = time.perf_counter()
    found[name] = round(1e3 * (now - last), 1)
    last = time.perf_counter()


cuda.room(0)
note("context")
cuda.load_kernels(0)
note("ftrun's kernels")
x = torch.ones(64, 64, device="cuda")
torch.cuda.synchronize()
note("torch")
torch.mm(x, x).sum().item()
note("cuBLAS")
torch.nn.functional.conv2d(x.view(1, 1, 64, 64), torch.ones(1, 1, 3, 3, device="cuda")).sum().item()
note("cuDNN")
if dist.is_nccl_available():
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("nccl", store=dist.FileStore(file.name, 1), rank=0, world_size=1)
        dist.all_reduce(x)
        torch.cuda.synchronize()
        note("NCCL, alone")
        dist.destroy_process_group()
print(json.dumps(found))
