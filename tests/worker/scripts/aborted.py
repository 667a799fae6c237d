"""Two ranks connect a group while another thread of each talks to itself over loopback; then rank 0 aborts it.

Prints, of rank 0: how many connections the abort closed, whether the other thread's connection lives, whether the
collective that rank 1 never joined is over or its threads are still.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ftrun.worker.inner import make_group

STRANGERS = 20


def strangers(stop: threading.Event, kept: list[tuple[socket.socket, socket.socket]]) -> None:
    """Connect to itself again and again, until told; the connections stay."""
    server = socket.create_server(("127.0.0.1", 0))
    while not stop.is_set() or len(kept) < STRANGERS:
        kept.append((socket.create_connection(server.getsockname()), server.accept()[0]))
        time.sleep(0.001)


def main() -> None:
    port, rank = int(sys.argv[1]), int(sys.argv[2])
    store = TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False)
    stop = threading.Event()
    kept: list[tuple[socket.socket, socket.socket]] = []
    thread = threading.Thread(target=strangers, args=(stop, kept))
    thread.start()
    inner = make_group(PrefixStore("world", store), rank, 2, timedelta(seconds=60), swappable=True)
    stop.set()
    thread.join()
    inner.group.allreduce([torch.ones(4)]).wait()
    if rank == 1:
        store.get("over")
        os._exit(0)
    alone = inner.group.allreduce([torch.ones(1 << 20)])
    before = inner.still
    inner.abort()
    deadline = time.monotonic() + 20
    while not (alone.is_completed() or inner.still) and time.monotonic() < deadline:
        time.sleep(0.0005)
    for out, back in kept:
        out.sendall(b"x")
        assert back.recv(1) == b"x"
    print(len(inner._sockets), "connections", len(kept) >= STRANGERS, before, time.monotonic() < deadline, flush=True)
    store.set("over", "")
    os._exit(0)


main()
