"""The client of the fd store: give it a descriptor, get one back, or lend it one for the length of a transfer.

Each call is one short connection with a deadline.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

from ftrun.core.shared import wire
from ftrun.core.shared.handle import Handle, Kind

_DEADLINE = 5.0  # seconds
_IMPORT = 60.0  # seconds: the first call to the driver may start it, on a machine with many GPUs


class FdStoreClient:
    """Calls raise OSError when the fd store is gone; callers go on without it (no adoption meanwhile)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _ask(
        self, message: dict[str, object], fds: tuple[int, ...] = (), deadline: float = _DEADLINE
    ) -> tuple[dict[str, object], list[int]]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(deadline)
            with wire.name_of(self._path) as name:
                sock.connect(name)
            wire.send(sock, message, fds)
            answer = wire.receive(sock)
        if answer is None:
            raise ConnectionError("the fd store closed the connection")
        return answer

    def put(self, rank: int, name: str, cell: int, fd: int, handle: Handle | None = None, parts: int = 0) -> str:
        """Let the fd store hold `fd` as the segment `name` of `rank`; a later put replaces it.

        `handle`: the kind and size of the memory, None = host memory. `parts`: how many allocations `name.0`, `name.1`, ...
        belong to it; the fd store drops further ones.

        Returns:
            "", or the reason why the fd store holds device memory by its descriptor only.
        """
        handle = handle or Handle(Kind.HOST, os.fstat(fd).st_size)
        message: dict[str, object] = {"op": "put", "rank": rank, "name": name, "cell": cell, "parts": parts}
        message["handle"] = handle.pack().hex()
        answer, _ = self._ask(message, (fd,), _IMPORT if handle.kind is Kind.CUDA else _DEADLINE)
        return str(answer.get("why", ""))

    def get(self, rank: int, name: str) -> int | None:
        """Return a new descriptor of the segment, which the caller closes; None if the fd store has none."""
        found = self.find(rank, name)
        return None if found is None else found[0]

    def find(self, rank: int, name: str) -> tuple[int, Handle] | None:
        """Return a new descriptor as `get` does, with the segment's handle."""
        answer, fds = self._ask({"op": "get", "rank": rank, "name": name})
        if not answer.get("ok") or not fds:
            return None
        return fds[0], Handle.unpack(bytes.fromhex(str(answer["handle"])))

    def lend_reads(self, rank: int, cell: int, fd: int, size: int) -> socket.socket:
        """Return a connection by which the fd store asks for parts of this rank's memory on a GPU, `size` bytes, into the buffer `fd`."""
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.settimeout(_DEADLINE)
            with wire.name_of(self._path) as name:
                sock.connect(name)
            wire.send(sock, {"op": "reads", "rank": rank, "cell": cell, "size": size}, (fd,))
            answer = wire.receive(sock)
            if answer is None or not answer[0].get("ok"):
                raise ConnectionError("the fd store closed the connection")
            sock.settimeout(None)
            stack.pop_all()
        return sock

    def forget(self, rank: int, name: str) -> None:
        """Let the fd store drop a segment, if it has it."""
        self._ask({"op": "forget", "rank": rank, "name": name})


class Lent:
    """Descriptors that one worker lends to the fd store, and to its successors, until it takes them back.

    The control thread calls `again`, the main thread the rest.
    """

    def __init__(self, fd_store: FdStoreClient) -> None:
        self._fd_store = fd_store
        self._lock = threading.Lock()
        self._items: dict[tuple[int, str], tuple[int, int, Handle | None]] = {}

    def hand_on(self, rank: int, name: str, cell: int, fd: int, handle: Handle | None = None) -> bool:
        """Let the fd store pass `fd` on as `name` of `rank`, until `take_back`. Return False if there is no fd store now: call again."""
        with self._lock:
            self._items[rank, name] = cell, fd, handle
            return self._send()

    def again(self) -> bool:
        """Give everything to a new fd store. Return False if it does not answer yet."""
        with self._lock:
            return self._send()

    def take_back(self, rank: int, name: str) -> None:
        """Let the fd store drop a descriptor. Call it before closing the descriptor."""
        with self._lock:
            self._items.pop((rank, name), None)
            with contextlib.suppress(OSError):  # a dead fd store holds nothing any more
                self._fd_store.forget(rank, name)

    def _send(self) -> bool:
        try:
            for (rank, name), (cell, fd, handle) in self._items.items():
                self._fd_store.put(rank, name, cell, fd, handle)
        except OSError:
            return False
        return True
