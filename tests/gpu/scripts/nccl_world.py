"""Makes an NCCL world, aborts it in the middle of a collective, makes it again. Arguments: folder rank size backend rounds."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

folder, backend = sys.argv[1], sys.argv[4]
rank, size, rounds = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[5])
torch.cuda.set_device(rank)
large = torch.ones(1 << 26, device="cuda")
made, aborted, threads, fds, memory = [], [], [], [], []
for number in range(rounds):
    begin = time.perf_counter()
    store = dist.FileStore(f"{folder}/{number}", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    small = torch.ones(8, device="cuda")
    dist.all_reduce(small)
    torch.cuda.synchronize()
    assert small.tolist() == [size] * 8
    made.append(1e3 * (time.perf_counter() - begin))
    if rank == 0:
        work = dist.all_reduce(large, async_op=True)  # with a peer it would wait for ever: nobody else joins
    begin = time.perf_counter()
    dist.group.WORLD._get_backend(torch.device("cuda")).abort()
    torch.cuda.synchronize()
    aborted.append(1e3 * (time.perf_counter() - begin))
    dist.destroy_process_group()
    threads.append(len(os.listdir("/proc/self/task")))
    fds.append(len(os.listdir("/proc/self/fd")))
    free, total = torch.cuda.mem_get_info()
    memory.append((total - free) >> 20)
found = {"made_ms": [round(ms) for ms in made], "aborted_ms": [round(ms) for ms in aborted]}
print(json.dumps({**found, "threads": threads, "fds": fds, "memory_mib": memory}))
