"""Rank 1 swaps its group again and again while rank 0 stands still in the middle of a message, and looks what stays of the old ones.

In one round it receives that message, in the next it is the one that sends; a second collective waits each time.

Prints, of rank 1: threads and connections that are there more than after the first group, once it has given them time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ftrun.worker.comm import backend, stillness

SIZE = 1 << 23  # numbers, 32 MB: more than a connection holds
ROUNDS = 4
LEFT: list[object] = []  # by rank 0, of which nobody asks what stays


def kept() -> tuple[int, int]:
    return len(stillness.threads()), len(backend._inodes())


def broadcast(group: object, message: torch.Tensor, root: int) -> object:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return group.broadcast([message], options)  # type: ignore[attr-defined]


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def torn(inner: backend.Inner, number: int, pid: int, store: TCPStore) -> None:
    """Rank 1: leave the group while rank 0 is stopped in a message of it."""
    message = torch.zeros(SIZE)
    if number % 2:
        store.set(f"sends {number}", "")
        os.kill(pid, signal.SIGSTOP)
        work = broadcast(inner.group, message, 1)
    else:
        work = inner.group.recv([message], 0, 0)
        store.set(f"sends {number}", "")
        while not message[SIZE // 64]:
            pass
        os.kill(pid, signal.SIGSTOP)
    while not stopped(pid):
        time.sleep(0.001)
    other = inner.group.allreduce([torch.ones(4)])
    time.sleep(0.05)
    assert number % 2 == 0 or not work.is_completed()
    del work  # as a collective does that fails because of another peer
    inner.abort()
    threading.Thread(target=inner.close, daemon=True).start()
    del other
    os.kill(pid, signal.SIGCONT)
    store.set(f"left {number}", "")


def leave(inner: backend.Inner, number: int, store: TCPStore) -> None:
    """Rank 0: send, or receive, until the other one has left."""
    store.get(f"sends {number}")
    message = torch.ones(SIZE)
    work = broadcast(inner.group, message, 1) if number % 2 else inner.group.send([message], 1, 0)
    store.get(f"left {number}")
    inner.abort()
    LEFT.append((inner, work))


def main() -> None:
    port, rank = int(sys.argv[1]), int(sys.argv[2])
    store = TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False)
    if rank == 0:
        store.set("pid", str(os.getpid()))
    pid = int(store.get("pid"))
    first = (0, 0)
    for number in range(ROUNDS):
        inner = backend.make_group(PrefixStore(f"world {number}", store), rank, 2, timedelta(seconds=300), backend.LOOPBACK)
        inner.group.allreduce([torch.ones(4)]).wait()
        first = kept() if number == 0 else first
        if rank == 0:
            leave(inner, number, store)
        else:
            torn(inner, number, pid, store)
        del inner
    deadline = time.monotonic() + 15
    while rank == 1 and any(now > before for now, before in zip(kept(), first, strict=True)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if rank == 1:
        print(*(max(0, now - before) for now, before in zip(kept(), first, strict=True)), flush=True)
        store.set("over", "")
    else:
        store.get("over")
    os._exit(0)


main()
