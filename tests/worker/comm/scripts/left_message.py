"""Rank 0 stops in the middle of sending; rank 1 gives the message up, aborts, and looks whether its other collective is over.

By itself Gloo's loop of rank 1 would run in circles from then on: it finds the rest of a message that nobody wants, again and again.

Prints, of rank 1: whether the message was cut off, whether the collective ended, processor time of its threads in half a second.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ftrun.core.system import procfs
from ftrun.worker.comm import backend, stillness

SIZE = 1 << 26  # numbers, 256 MB


def processor_time(threads: set[str]) -> float:
    found = (procfs.stat("self", thread) for thread in threads)
    return sum(int(fields[11]) + int(fields[12]) for fields in found if fields) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    port, rank = int(sys.argv[1]), int(sys.argv[2])
    store = TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False)
    before = stillness.threads()
    inner = backend.make_group(PrefixStore("world", store), rank, 2, timedelta(seconds=60), backend.LOOPBACK)
    group, threads = inner.group, stillness.threads() - before
    group.allreduce([torch.ones(4)]).wait()
    if rank == 0:
        store.set("pid", str(os.getpid()))
        sent = group.send([torch.ones(SIZE)], 1, 0)
        sent.wait()
        store.get("over")
        os._exit(0)
    pid = int(store.get("pid"))
    message = torch.zeros(SIZE)
    received = group.recv([message], 0, 0)
    while not message[SIZE // 64]:
        pass
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(0.2)
        torn = not message[-1]
        other = group.allreduce([torch.ones(4)])
        time.sleep(0.2)
        del received  # as a collective does that fails because of another peer
        inner.abort()
        deadline = time.monotonic() + 20
        while not other.is_completed() and time.monotonic() < deadline:
            time.sleep(0.0005)
        ended, used = other.is_completed(), processor_time(threads)
        time.sleep(0.5)
        print(torn, ended, processor_time(threads) - used, flush=True)
    finally:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


main()
