"""Variables that torch reads when it is imported, or before, are set at the top of the script."""

import os

os.environ |= {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
os.environ |= {"TORCHDYNAMO_DISABLE": "1", "TORCH_LOGS": "+dynamo", "PYTORCH_JIT": "0"}

import logging

import torch
import torch.distributed as dist
from leave import leave

dist.init_process_group("gloo")
calls = 0


def twice(x: torch.Tensor) -> torch.Tensor:
    global calls
    calls += 1
    return 2 * x


compiled = torch.compile(twice, backend="eager")
for _ in range(4):
    compiled(torch.ones(2))
leave(
    dist.get_rank(),
    threads=torch.get_num_threads(),
    debug=dist.get_debug_level().name,
    calls=calls,
    jit=torch.jit._state._enabled.enabled,
    logs=logging.getLogger("torch._dynamo").getEffectiveLevel(),
)
dist.barrier()  # Gloo fails a rank that still connects when its peer has left
dist.destroy_process_group()
