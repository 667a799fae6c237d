"""Forwards frames between the ports of a network namespace, and loses some: a switch whose cables can be bad, one way or both.

    python -m tests.e2e.switch RULES PORT...

RULES is a JSON file, {port: [share lost on the way to it, share lost on the way from it]}, read again when it is replaced.
"""

from __future__ import annotations

import contextlib
import json
import random
import selectors
import socket
import sys
from pathlib import Path

_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING, _ALL = 263, 15, 23, 0x0003
_OFFLOADS = 10  # bytes before a frame that say what the kernel has left to do: checksums, cutting it into packets
_LARGEST = 1 << 17
_LOOK = 0.05  # seconds between two looks at the rules, at most


class Switch:
    def __init__(self, rules: Path, ports: list[str]) -> None:
        self._rules = rules
        self._read_at = 0
        self._lost: dict[str, list[float]] = {}
        self._behind: dict[bytes, str] = {}  # address -> port
        self._select = selectors.DefaultSelector()
        self._ports = {port: self._open(port) for port in ports}

    def _open(self, port: str) -> socket.socket:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        sock.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
        sock.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
        sock.bind((port, 0))
        self._select.register(sock, selectors.EVENT_READ, port)
        return sock

    def serve(self) -> None:
        while True:
            for key, _ in self._select.select(_LOOK):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                with contextlib.suppress(OSError):  # a machine goes
                    self._forward(key.data, sock.recv(_LARGEST))
            self._look()

    def _look(self) -> None:
        changed = self._rules.stat().st_mtime_ns
        if changed != self._read_at:
            self._read_at, self._lost = changed, json.loads(self._rules.read_text())

    def _forward(self, port: str, frame: bytes) -> None:
        to, by = frame[_OFFLOADS : _OFFLOADS + 6], frame[_OFFLOADS + 6 : _OFFLOADS + 12]
        self._behind[by] = port
        for target in [self._behind[to]] if to in self._behind else [other for other in self._ports if other != port]:
            kept = (1 - self._lost.get(port, [0, 0])[1]) * (1 - self._lost.get(target, [0, 0])[0])
            if target != port and random.random() < kept:
                with contextlib.suppress(OSError):
                    self._ports[target].send(frame)


if __name__ == "__main__":
    Switch(Path(sys.argv[1]), sys.argv[2:]).serve()
