"""Two ranks connect a group while another thread of each talks to itself over loopback; then rank 0 aborts it.

That thread begins to listen in the very moment in which the group does.

Prints, of rank 0: how many connections the abort closed, whether the other thread's connection lives, whether the
collective that rank 1 never joined is over or its threads are still.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ftrun.worker.comm import backend

STRANGERS = 20


def strangers(server: socket.socket, stop: threading.Event, kept: list[tuple[socket.socket, socket.socket]]) -> None:
    """Connect to itself again and again, until told; the connections stay."""
    while not stop.is_set() or len(kept) < STRANGERS:
        kept.append((socket.create_connection(server.getsockname()), server.accept()[0]))
        time.sleep(0.001)


def listens_as_the_group_does(start: Callable[[socket.socket], None]) -> None:
    """Begin to listen between the group's look at what is open and its look at what listens."""
    made, begun = backend._devices, []

    def devices(loopback: bool) -> list[Any]:
        if not begun:
            begun.append(socket.create_server(("127.0.0.1", 0)))
            start(begun[0])
        return made(loopback)

    backend._devices = devices


def main() -> None:
    port, rank = int(sys.argv[1]), int(sys.argv[2])
    store = TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False)
    stop = threading.Event()
    kept: list[tuple[socket.socket, socket.socket]] = []
    threads = []

    def start(server: socket.socket) -> None:
        threads.append(threading.Thread(target=strangers, args=(server, stop, kept)))
        threads[0].start()

    listens_as_the_group_does(start)
    group = backend.make_group(PrefixStore("world", store), rank, 2, timedelta(seconds=60), backend.LOOPBACK)
    stop.set()
    threads[0].join()
    group.group.allreduce([torch.ones(4)]).wait()
    if rank == 1:
        store.get("over")
        os._exit(0)
    alone = group.group.allreduce([torch.ones(1 << 20)])
    before = group.still
    group.abort()
    deadline = time.monotonic() + 20
    while not (alone.is_completed() or group.still) and time.monotonic() < deadline:
        time.sleep(0.0005)
    for out, back in kept:
        out.sendall(b"x")
        assert back.recv(1) == b"x"
    print(len(group._sockets), "connections", len(kept) >= STRANGERS, before, time.monotonic() < deadline, flush=True)
    store.set("over", "")
    os._exit(0)


main()
