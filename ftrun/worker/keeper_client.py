"""Asking the keeper: give it a descriptor, get one back. Each call is one short connection with a deadline."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ftrun.core import wire

_DEADLINE = 5.0  # seconds


class KeeperClient:
    """Calls raise OSError when the keeper is gone; callers go on without it (no adoption meanwhile)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _ask(self, message: dict[str, object], fds: tuple[int, ...] = ()) -> tuple[dict[str, object], list[int]]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(_DEADLINE)
            sock.connect(os.fspath(self._path))
            wire.send(sock, message, fds)
            answer = wire.receive(sock)
        if answer is None:
            raise ConnectionError("the keeper closed the connection")
        return answer

    def put(self, rank: int, name: str, cell: int, fd: int) -> None:
        """Have the keeper hold `fd` as the segment `name` of `rank`; a later put replaces it."""
        self._ask({"op": "put", "rank": rank, "name": name, "cell": cell}, (fd,))

    def get(self, rank: int, name: str) -> int | None:
        """A new descriptor of the segment (the caller closes it), None when the keeper has none."""
        answer, fds = self._ask({"op": "get", "rank": rank, "name": name})
        if not answer.get("ok") or not fds:
            return None
        return fds[0]

    def forget(self, rank: int, name: str) -> None:
        """Have the keeper let go of a segment; nothing happens when it has none."""
        self._ask({"op": "forget", "rank": rank, "name": name})
