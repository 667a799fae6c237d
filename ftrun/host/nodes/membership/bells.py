"""Bells between agents: a datagram that says "look at the records now", so that a repair does not wait for the next look.

A bell carries nothing that counts. One that is lost, late, forged or sent twice costs or saves a look; the records alone say what happens.
A datagram is the HMAC of a fixed word under the secret of the round, so that a stranger who wants to keep agents looking must know it.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
from collections.abc import Callable, Iterable

_WORD = b"ftrun: look"


class Bells:
    """One agent's bell: `on_ring` is called in a thread of its own when another agent rings. Without a port nobody can ring it."""

    def __init__(self, address: str, on_ring: Callable[[], None]) -> None:
        self._on_ring = on_ring
        self._token = b""
        self.port = 0
        self._closed = False
        self._sock: socket.socket | None = None
        with contextlib.suppress(OSError):  # agents then look at their usual pace
            family, kind, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
            sock = socket.socket(family, kind)
            sock.bind(where)
            self._sock, self.port = sock, int(sock.getsockname()[1])
            threading.Thread(target=self._listen, args=(sock,), name="ftrun-bells", daemon=True).start()

    def use(self, secret: str) -> None:
        """Ring, and be rung, by the secret of the present round."""
        self._token = hmac.digest(secret.encode(), _WORD, "sha256") if secret else b""

    def ring(self, others: Iterable[tuple[str, int]]) -> None:
        """Ring the agents at these addresses and ports; port 0: that one has no bell."""
        for address, port in others:
            if self._sock is not None and port and self._token:
                with contextlib.suppress(OSError):
                    self._sock.sendto(self._token, (address, port))

    def close(self) -> None:
        self._closed = True
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # raises, since it is not connected, and wakes the thread all the same
            self._sock.close()

    def _listen(self, sock: socket.socket) -> None:
        while not self._closed:
            try:
                data = sock.recv(64)
            except OSError:
                return
            if self._token and hmac.compare_digest(data, self._token):
                self._on_ring()
