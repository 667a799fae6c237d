"""The real process group inside a SwapGroup: built for one generation, aborted from another thread, thrown away."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo

from ftrun.worker.comm.stillness import Stillness, threads
from ftrun.worker.torch_compat import torch_private

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # read by NCCL groups when they are built
_TRIES = 5  # a try takes less than a millisecond
LOOPBACK = "127.0.0.1"
_WAKE = timedelta(milliseconds=2)
_NOBODYS = 2**31 - 4096  # no message has a tag from here on; if two messages of different sizes met, Gloo would end the process
_LINGER = 5.0  # seconds that a member which leaves waits for those that are still connecting


class Outcome(NamedTuple):
    """The outcome of a work, with the interface of torch's futures: `value()` raises if the work failed."""

    value: Callable[[], Any]


_Wait = tuple[Any, Callable[[Outcome], None]] | None  # None ends the thread
_Aside = tuple[Callable[[], Any], Callable[[Any], None]] | None  # None ends the thread


def _cut_off() -> None:
    """Raise instead of waiting for a work of an aborted group, whose result would be written when nobody expects it any more."""
    raise RuntimeError("the connections of this process group were shut down")


class Inner:
    """A full ProcessGroup with its devices and the sockets that wake it."""

    def __init__(
        self,
        group: Any,
        devices: list[torch.device],
        sockets: list[socket.socket],
        stillness: Stillness | None,
        keep: Any,
        communicator: Any = None,
        gloo: Any = None,
        peers: Sequence[int] = (),
        contexts: int = 1,
    ) -> None:
        self.group = group
        self._gloo, self._peers = gloo, peers  # ranks to whose connections `_let_go` applies
        self._contexts = contexts  # of Gloo, one for each of its devices, by the tag of a message
        self.devices = devices
        self._sockets = sockets
        self._keep = keep
        self._communicator = communicator  # a backend for GPUs, which a call wakes and not its sockets
        self._waits: queue.SimpleQueue[_Wait] | None = None
        self._idle: list[queue.SimpleQueue[_Aside]] = []  # queues of idle threads
        self._aborted = self._shut = False
        self._stillness = stillness  # None: the group's threads do not reveal what a GPU does
        self.generation = 0
        self.all_connected: Callable[[], bool] | None = None  # has every member finished connecting?

    @property
    def still(self) -> bool:
        """Is it aborted, and do all its threads wait in vain, so that none of its collectives writes anything any more?"""
        return self._shut and self._stillness is not None and self._stillness.seen()

    def abort(self) -> None:
        """Wake threads blocked in this group: shut down its connections (Gloo), abort its communicators (NCCL)."""
        if self._aborted:
            return
        self._aborted = True
        self._let_go()
        self.cut()
        self._shut = True
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            # torch has several classes for NCCL, and the name "nccl" means another one from 2.15 on
            getattr(communicator, "abort", communicator.shutdown)()

    def cut(self) -> None:
        """Shut the connections down and do nothing else, as a failing link does."""
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer's end is gone already

    def _let_go(self) -> None:
        """Make Gloo close all connections of this group: a wait that times out there ends every present and later wait.

        To shut the connections down is not enough. Gloo notices that by reading, and it does not read while a message waits that nobody
        wants any more (its collective failed in the middle); then a waiting thread goes on waiting, with the threads and descriptors
        of the group. This call comes before the shutdown: Gloo queues a message sent between a shutdown and the read, and forgets it
        (`Pair::signalException` passes over unbound buffers in `tx_`). It also forgets a message that was queued for a full socket:
        that thread stays until the group's timeout.
        """
        gloo, first = self._gloo, _NOBODYS // self._contexts * self._contexts
        for device, peer in itertools.product(range(self._contexts), self._peers if gloo is not None else ()):
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.zeros(1, device="cpu")], peer, first + device).wait(_WAKE)

    def when_waited(self, work: Any, then: Callable[[Outcome], None]) -> None:
        """Let a thread of this group wait for `work`, which has no future, and call `then` with its outcome."""
        if self._waits is None:
            self._waits = queue.SimpleQueue()
            threading.Thread(target=self._wait, args=(self._waits,), name="ftrun-wait", daemon=True).start()
        self._waits.put((work, then))

    def _wait(self, waits: queue.SimpleQueue[_Wait]) -> None:
        if self._stillness is not None:
            self._stillness.add(threading.get_native_id())
        while (wait := waits.get()) is not None:
            work, then = wait
            with (
                torch.inference_mode()
            ):  # Gloo writes the result now; the mode of the caller, who asked for it, is unknown
                then(Outcome(_cut_off if self._aborted else work.wait))
            del wait, work, then  # they keep the group alive

    def aside(self, wait: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Call `wait`, which blocks in this group, in another thread, and `then` with its result.

        The end of the connections does not wake every wait, but the main thread must always wake. One thread serves a group
        as long as its waits do not overlap; a thread that nothing wakes is left behind.
        """
        try:
            waits = self._idle.pop()
        except IndexError:
            waits = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(waits,), name="ftrun-wait", daemon=True).start()
        waits.put((wait, then))

    def _serve(self, waits: queue.SimpleQueue[_Aside]) -> None:
        while (asked := waits.get()) is not None:
            wait, then = asked
            outcome = wait()
            self._idle.append(waits)
            then(outcome)
            del asked, wait, then, outcome  # they keep the group alive
            if self.group is None:
                return

    def leave(self) -> None:
        """Close the group for good, after giving peers that are still connecting a while. Call it in a thread of its own."""
        deadline = time.monotonic() + _LINGER
        while self.all_connected is not None and not self.all_connected() and time.monotonic() < deadline:
            time.sleep(0.001)
        self.abort()
        self.close()

    def close(self) -> None:
        """Drop the group. Call it in a thread of its own: it may take as long as a stuck peer's timeout."""
        for sock in self._sockets:
            sock.close()
        self._sockets = []
        self.group = self._gloo = None
        for waits in (self._waits, *self._idle):
            if waits is not None:
                waits.put(None)
        self._keep = self.all_connected = None


def _inodes() -> dict[str, int]:
    """Map the inode of every socket of this process to its descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found[target] = int(name)
    return found


def _opened_since(before: set[str]) -> Iterator[socket.socket]:
    """Yield a duplicate of every TCP socket that this process has opened since; the next step closes it."""
    for inode, fd in _inodes().items():
        if inode in before:
            continue
        try:
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type & 0xF == socket.SOCK_STREAM:
                yield sock


def _listening(before: set[str]) -> set[int]:
    """Return the ports on which this process has begun to listen since."""
    sockets = _opened_since(before)
    return {s.getsockname()[1] for s in sockets if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


def _connected(before: set[str], mine: set[int], theirs: set[int], loopback: bool) -> list[socket.socket]:
    """Return duplicates of the connections opened since that came in on ports `mine` or go out to ports `theirs`.

    Listening sockets must not be touched. `loopback`: only connections to this machine.
    """
    found = []
    for sock in _opened_since(before):
        try:
            host, port = sock.getpeername()[:2]
        except OSError:
            continue  # it listens, or the peer is gone
        if (sock.getsockname()[1] in mine or port in theirs) and (not loopback or host == "127.0.0.1"):
            found.append(socket.socket(fileno=sock.detach()))  # `dup` would make the connection block, for Gloo too
    return found


def _devices(address: str) -> list[Any]:
    """Make Gloo's devices, each of which listens on a port of its own; `address` "" = torch's choice."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return [ProcessGroupGloo.create_device(interface=name) for name in interface.split(",")]
    if address:
        return [ProcessGroupGloo.create_device(hostname=address)]
    return [ProcessGroupGloo.create_default_device()]


def _own_devices(address: str) -> tuple[list[Any], set[str], set[int]]:
    """Return Gloo's devices, the sockets that this process had before, and the ports on which the devices listen.

    This tries again if another thread began to listen at the same moment: its port would be taken for a device's.
    """
    for _ in range(_TRIES):
        before = set(_inodes())
        devices = _devices(address)
        mine = _listening(before)
        if len(mine) == len(devices):
            break
    return devices, before, mine


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, devices: list[Any]) -> Any:
    return ProcessGroupGloo(store, rank, size, torch_private.gloo_options(timeout, devices))


@contextlib.contextmanager
def _no_handling() -> Iterator[None]:
    """Build groups meanwhile that do not end the process when NCCL fails, since ftrun replaces them.

    The script's own groups, which ftrun does not recover, keep the variable's value.
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


def came(rank: int) -> str:
    """Return the key by which the others know that this rank of a group has begun to connect, and on which ports."""
    return f"ports/{rank}"


def make_group(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    address: str = "",
    far: Callable[[], Any] | None = None,
    on_cpu: bool = False,
) -> Inner:
    """Build Gloo for CPU tensors and, if there is a GPU, NCCL (Gloo where ranks share a GPU) for CUDA tensors.

    `address`: the group is inside a SwapGroup, so that it can be aborted, and the others reach this rank there; "" = it is not. Its
    members wait for one another in `store` before any of them connects. `far` returns the store that NCCL keeps; None: `store`.
    `on_cpu`: leave GPUs out.
    """
    group, swappable = ProcessGroup(store, rank, size), bool(address)
    others = threads()
    gloo_devices, before, mine = _own_devices(address)
    loops = threads() - others
    theirs: set[int] = set()
    if swappable:
        # members exchange their ports, to tell the group's connections from those of other threads of this process
        store.set(came(rank), json.dumps(sorted(mine)))
        said = store.multi_get([came(r) for r in range(size) if r != rank])
        theirs = {port for ports in said for port in json.loads(ports)}
    others = threads()
    gloo = _gloo(PrefixStore("cpu/", store), rank, size, timeout, gloo_devices)
    stillness: Stillness | None = Stillness((threads() - others) | loops)
    devices = [torch.device("cpu")]
    nccl = None
    torch_private.use_by_default(group, ProcessGroup.BackendType.GLOO)
    torch_private.use_backend(group, torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    if torch.cuda.is_available() and not on_cpu:
        devices.append(torch.device("cuda"))
        if dist.is_nccl_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
            with _no_handling():
                nccl = torch_private.nccl(PrefixStore("cuda/", far() if far else store), rank, size, timeout, group)
            torch_private.use_by_default(group, ProcessGroup.BackendType.NCCL)
            torch_private.use_backend(group, torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)
            stillness = None  # sleeping threads do not prove that the GPU is idle
        else:
            torch_private.use_backend(group, torch.device("cuda"), ProcessGroup.BackendType.GLOO, gloo)
    sockets: list[socket.socket] = []
    if swappable and size > 1:
        sockets = _connected(before, mine, theirs, address == LOOPBACK and "GLOO_SOCKET_IFNAME" not in os.environ)
    peers = [peer for peer in range(size) if peer != rank] if sockets else []
    return Inner(group, devices, sockets, stillness, store, nccl, gloo, peers, len(gloo_devices))
