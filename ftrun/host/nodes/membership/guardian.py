"""Listens to the guardian of another node: its fd store, which ends the node's ranks when its launcher dies, and then says so.

Its word is certain: nothing of that node can do harm any more, so the others need not wait until its record has stood still. A connection
that only ends says nothing: the network may be cut, or a new fd store follows. Then, and of a machine that is lost, the record decides.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ftrun.core.shared import far

_CONNECT = 5.0  # seconds
_AGAIN = 1.0  # seconds between two tries to connect


@dataclass(frozen=True)
class Guarded:
    """A node and its guardian: `secret` is that of the round."""

    node: str
    address: str
    port: int
    secret: str


class Guardian:
    """Listens in a thread of its own; `on_ended` is called there with the id of a node whose launcher and ranks have ended."""

    def __init__(self, on_ended: Callable[[str], None]) -> None:
        self._on_ended = on_ended
        self._news = threading.Condition()
        self._wanted: Guarded | None = None
        self._closed = False
        self._sock: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def listen(self, to: Guarded | None) -> None:
        """Listen to this guardian from now on, and to no other; None: to nobody."""
        with self._news:
            if to == self._wanted or self._closed:
                return
            self._wanted = to
            self._hang_up()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ftrun-guardian", daemon=True)
                self._thread.start()

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._hang_up()

    def _hang_up(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._news.notify()

    def _run(self) -> None:
        heard: Guarded | None = None  # the last one that we have listened to
        while (wanted := self._next(heard)) is not None:
            with contextlib.suppress(OSError):
                if self._hears_the_end(wanted):
                    self._on_ended(wanted.node)
            heard = wanted

    def _next(self, heard: Guarded | None) -> Guarded | None:
        """Wait for somebody to listen to, a while where it is the same again; None: no more."""
        with self._news:
            self._news.wait_for(lambda: self._closed or self._wanted != heard, _AGAIN)
            self._news.wait_for(lambda: self._closed or self._wanted is not None)
            return None if self._closed else self._wanted

    def _hears_the_end(self, of: Guarded) -> bool:
        """Wait for the guardian's word. Raises OSError when the connection fails or ends."""
        with socket.create_connection((of.address, of.port), _CONNECT) as sock:
            with self._news:
                self._sock = sock
                if self._closed or self._wanted != of:
                    return False
            try:
                challenge = far.exactly(sock, far.CHALLENGE)
                sock.sendall(far.watcher(of.secret, challenge))
                nonce = secrets.token_hex(far.CHALLENGE)
                far.send(sock, {"op": "watch", "nonce": nonce})
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.settimeout(None)
                told = str(far.receive(sock).get("ended", ""))
                return hmac.compare_digest(told.encode(), far.ended(of.secret, nonce).encode())
            finally:
                with self._news:
                    self._sock = None
