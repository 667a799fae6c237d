"""Gives parts of the memory that the fd store holds to replacements on other nodes, in threads beside the one that serves.

The launcher of another node that watches this one is told here, too, when this node has ended.

Nothing but that is asked for while nothing is repaired. A connection that stays silent is closed, but for one that watches, and a client
that does not know the run's secret gets nothing. Bytes are read by `pread`, never mapped: the memory may shrink or change while it is read,
and the client checks afterwards that the replica's commit mark is still the same. Memory on a GPU is read by the worker that uses it
(gpu_reads.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ftrun import native
from ftrun.core import shape
from ftrun.core.shared import far

_SILENT = 120.0  # seconds: a replacement may wait so long between two looks
_LATER = 0.1
_AT_ONCE = 64  # connections
_READ = shape.record({"rank": shape.whole, "name": shape.text, "ranges": shape.listed(shape.row(shape.whole, shape.whole))})
_SIZE = shape.record({"rank": shape.whole, "name": shape.text})
_WATCH = shape.record({"nonce": shape.text})


class Borrowed(Protocol):
    """Memory of `size` bytes."""

    @property
    def size(self) -> int: ...

    def read(self, room: memoryview, at: int) -> int:
        """Read into `room` from offset `at`; return how many bytes, 0 beyond the end. Raises OSError."""
        ...

    def close(self) -> None: ...


class HostMemory:
    """Host memory behind a descriptor, which `close` closes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size = os.fstat(fd).st_size

    def read(self, room: memoryview, at: int) -> int:
        return os.preadv(self._fd, [room], at)

    def close(self) -> None:
        os.close(self._fd)


class MemoryServer:
    """Serves the memory that `borrow(rank, name)` lends, None if there is no such one."""

    def __init__(self, borrow: Callable[[int, str], Borrowed | None], address: str, secret: str) -> None:
        """Listen on any free port of `address`. Raises OSError."""
        self._borrow = borrow
        self._secret = secret
        self._closed = False
        self._room = threading.BoundedSemaphore(_AT_ONCE)
        self._watching: dict[socket.socket, str] = {}  # connections of those that watch this node, with their nonces
        self._lock = threading.Lock()  # around these
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((address, 0), family=family, backlog=_AT_ONCE)
        self.port = int(self._listener.getsockname()[1])

    def start(self) -> None:
        threading.Thread(target=self._accept, name="ftrun-memory", daemon=True).start()

    def close(self) -> None:
        """Take no more connections, and let those who watch look for the next server."""
        self._closed = True
        with self._lock:
            for sock in self._watching:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def tell_ended(self) -> None:
        """Tell those who watch that the launcher and the ranks of this node have ended."""
        with self._lock:
            for sock, nonce in self._watching.items():
                with contextlib.suppress(OSError):
                    far.send(sock, {"ended": far.ended(self._secret, nonce)})

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0 or self._closed:
                    return
                time.sleep(_LATER)  # no descriptor is left, or the client has gone away again
                continue
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(sock,), name="ftrun-memory", daemon=True).start()
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock, contextlib.suppress(OSError, ValueError):
                sock.settimeout(_SILENT)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                challenge = secrets.token_bytes(far.CHALLENGE)
                sock.sendall(challenge)
                answer = far.exactly(sock, far.ANSWER)
                if hmac.compare_digest(answer, far.watcher(self._secret, challenge)):
                    asked = far.receive(sock)
                    if asked.get("op") == "watch" and _WATCH(asked):
                        self._be_watched(sock, asked["nonce"])
                elif hmac.compare_digest(answer, far.answer(self._secret, challenge)):
                    while True:
                        self._reply(sock, challenge, far.receive(sock))
        finally:
            self._room.release()

    def _be_watched(self, sock: socket.socket, nonce: str) -> None:
        """Keep a connection until its peer hangs up, for `tell_ended`."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with self._lock:
            if self._closed:
                return
            self._watching[sock] = nonce
        try:
            sock.settimeout(None)
            sock.recv(1)
        finally:
            with self._lock:
                del self._watching[sock]

    def _reply(self, sock: socket.socket, challenge: bytes, asked: dict[str, Any]) -> None:
        """Answer a request. Raises ValueError for one that nobody sends, and OSError."""
        reads = asked.get("op") == "read"
        if not (_READ if reads else _SIZE)(asked):
            raise ValueError("a question that nobody asks")
        if reads and min(map(min, asked["ranges"]), default=0) < 0:
            raise ValueError("a range before the beginning of the segment")
        memory = self._borrow(asked["rank"], asked["name"])
        if memory is None:
            far.send(sock, {"ok": False})
            return
        with contextlib.closing(memory):
            if not reads:
                far.send(sock, {"ok": True, "size": memory.size})
                return
            far.send(sock, {"ok": True})
            buffer = ctypes.create_string_buffer(min(far.CHUNK, max((size for _, size in asked["ranges"]), default=0)) or 1)
            for at, size in asked["ranges"]:
                seal = functools.partial(far.seal, self._secret, challenge, asked["rank"], asked["name"])
                _send_range(sock, memory, (at, at + size), buffer, seal)


def _send_range(
    sock: socket.socket,
    memory: Borrowed,
    where: tuple[int, int],
    buffer: ctypes.Array[ctypes.c_char],
    seal: Callable[[int, memoryview], bytes],
) -> None:
    room, (at, end) = memoryview(buffer), where
    while at < end:
        got = memory.read(room[: min(len(room), end - at)], at)
        if not got:
            raise ValueError("a range beyond the end of the segment")
        sock.sendall(far.HEAD.pack(got, native.checksum(ctypes.addressof(buffer), got)))
        sock.sendall(room[:got])
        sock.sendall(seal(at, room[:got]))
        at += got
