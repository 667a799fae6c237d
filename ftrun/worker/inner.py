"""The real process group inside a SwapGroup: built for one generation, aborted from another thread, thrown away."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore

from ftrun.core.world import World
from ftrun.worker.context import Context, Interrupt

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # read by NCCL groups when they are built
_HOLD = 30.0  # seconds that a failed connection is held back for the stop that should explain it


class Inner:
    """A full ProcessGroup with its devices and the sockets that wake it."""

    def __init__(self, group: Any, devices: list[torch.device], sockets: list[socket.socket], keep: Any) -> None:
        self.group = group
        self.devices = devices
        self._sockets = sockets
        self._keep = keep
        self._aborted = False
        self.generation = 0

    def abort(self) -> None:
        """Wake threads blocked in this group: shut down its connections (Gloo), abort its communicators (NCCL)."""
        if self._aborted:
            return
        self._aborted = True
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer's end is gone already
        if torch.device("cuda") in self.devices and _has_nccl(self.group):
            self.group._get_backend(torch.device("cuda")).abort()

    def close(self) -> None:
        """Drop the group. May take as long as a stuck peer's timeout: call from a thread of its own."""
        for sock in self._sockets:
            sock.close()
        self._sockets = []
        self.group = None
        self._keep = None


def _has_nccl(group: Any) -> bool:
    return group is not None and group._get_backend(torch.device("cuda")).name() == "nccl"


def _inodes() -> dict[str, int]:
    """Socket inode -> descriptor of every socket of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found[target] = int(name)
    return found


def _connected(before: set[str], loopback: bool) -> list[socket.socket]:
    """Duplicates of the connected TCP sockets that appeared since `before`. Listening ones must not be touched.

    `loopback`: only those to this machine, so that what another thread connects meanwhile is left alone.
    """
    found = []
    for inode, fd in _inodes().items():
        if inode in before:
            continue
        try:
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        try:
            internet = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type & 0xF == socket.SOCK_STREAM
            ours = internet and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if ours and (not loopback or sock.getpeername()[0] == "127.0.0.1"):
                found.append(sock)
                continue
        except OSError:
            pass
        sock.close()
    return found


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, loopback: bool) -> Any:
    options = ProcessGroupGloo._Options()
    options._timeout = timeout
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        options._devices = [ProcessGroupGloo.create_device(interface=name) for name in interface.split(",")]
    elif loopback:
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    else:
        options._devices = [ProcessGroupGloo.create_default_device()]
    options._threads = 2 * len(options._devices)
    return ProcessGroupGloo(store, rank, size, options)


@contextlib.contextmanager
def _no_handling() -> Iterator[None]:
    """A group that is built meanwhile does not end the process when NCCL fails: this one is replaced.

    The script's own groups, in which nothing is recovered, keep what the variable said.
    """
    said = os.environ.get(_HANDLING)
    os.environ[_HANDLING] = "0"
    try:
        yield
    finally:
        if said is None:
            del os.environ[_HANDLING]
        else:
            os.environ[_HANDLING] = said


def make_group(
    store: Any, rank: int, size: int, timeout: timedelta, before: set[str] | None, loopback: bool = False
) -> Inner:
    """Build Gloo for CPU tensors, and NCCL (Gloo where ranks share a GPU) for CUDA tensors when there is one."""
    group = ProcessGroup(store, rank, size)
    gloo = _gloo(PrefixStore("cpu/", store), rank, size, timeout, loopback)
    devices = [torch.device("cpu")]
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    if torch.cuda.is_available():
        devices.append(torch.device("cuda"))
        if dist.is_nccl_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
            from torch._C._distributed_c10d import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            with _no_handling():
                nccl = ProcessGroupNCCL(PrefixStore("cuda/", store), rank, size, options)
            group._set_default_backend(ProcessGroup.BackendType.NCCL)
            group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)
        else:
            group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.GLOO, gloo)
    sockets = _connected(before, loopback and "GLOO_SOCKET_IFNAME" not in os.environ) if before is not None else []
    return Inner(group, devices, sockets, store)


def build_inner(
    context: Context,
    world: World,
    key: str,
    ranks: Sequence[int],
    my_rank: int,
    timeout: timedelta,
    meanwhile: Callable[[], None] | None = None,
) -> Inner:
    """Connect the members of a group in `world`. Raises Interrupt when a later generation stops it.

    `meanwhile` runs in this thread while the connection is made.

    The connection is made in a thread of its own with a store client of its own: both are abandoned when the world
    stops, since nothing wakes a thread that waits in a TCPStore for a rank that died.
    """
    box: list[Any] = []
    ready = threading.Event()

    def connect() -> None:
        try:
            store = TCPStore(world.store_host, world.store_port, None, False, timeout, wait_for_workers=False)
            before = set(_inodes())
            prefixed = PrefixStore(f"{world.prefix()}/{key}", store)
            box.append(make_group(prefixed, my_rank, len(ranks), timeout, before, loopback=True))
        except BaseException as error:
            box.append(error)
        ready.set()

    worker = threading.Thread(target=connect, name="ftrun-connect", daemon=True)
    worker.start()
    if meanwhile is not None:
        meanwhile()
    deadline = time.monotonic() + timeout.total_seconds()
    while not ready.wait(0.02):
        if context.stop_pending():
            raise Interrupt
        if time.monotonic() > deadline:
            raise TimeoutError(f"process group {key} of generation {world.generation} was not complete in {timeout}")
    if isinstance(box[0], BaseException):
        # a peer or the store died, and this world will be stopped; in a fresh one there is nothing to stop for
        context.wait_until(lambda: False, 0.0 if world.fresh else _HOLD)
        raise box[0]
    if context.stop_pending():
        box[0].abort()
        raise Interrupt
    inner: Inner = box[0]
    inner.generation = world.generation
    return inner
