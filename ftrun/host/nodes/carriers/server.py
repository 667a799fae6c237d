"""Serves records over TCP, from a thread in the agent whose machine owns the endpoint.

The server knows nothing about rounds. It keeps records, answers what changed since a version, and marks the records of a client
whose connection closed with "gone". The run's id is the secret between its nodes: a client that greets without it, or with another
version, gets a bare refusal or no answer, and learns nothing of the run from either.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import threading
from typing import Any

from ftrun.core.waiting import wait_for
from ftrun.host.nodes.carriers.carrier import OVER, Record
from ftrun.host.nodes.messages import MAX_FRAME, VERSION, frame, pack, take, text

_LONGEST_GREETING = 4096  # bytes; a stranger may not have us keep more
_MOST_NEWS = MAX_FRAME // 2  # bytes of records in one answer
_MAX_UNREAD = 64 * 1024 * 1024  # bytes that a client may leave unread before it is dropped


class _Peer:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.greeted = False
        self.owned: set[str] = set()


class Server:
    """The server of run `run_id`. It takes `listener` over, and serves until `stop`."""

    def __init__(self, listener: socket.socket, run_id: str) -> None:
        self._run_id = run_id
        self._listener = listener
        self._records: dict[str, Record] = {}
        self._texts: dict[str, str] = {}  # name -> its part of an answer, made once for all who ask
        self._changed: dict[str, int] = {}  # name -> version in which it changed last
        self._version = 0
        self._peers: dict[int, _Peer] = {}
        self._poll = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        listener.setblocking(False)
        self._poll.register(listener, selectors.EVENT_READ)
        self._poll.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="ftrun-rendezvous", daemon=True)
        self._thread.start()

    def stop(self, patience: float) -> None:
        """End once every client has left, or after `patience` seconds."""
        wait_for(lambda: not self._peers or not self._thread.is_alive(), patience, 0.01)
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(2.0)

    def _serve(self) -> None:
        while not self._stopping:
            for key, events in self._poll.select(1.0):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd != self._wake:
                    self._attend(self._peers[key.fd], events)
        for peer in list(self._peers.values()):
            peer.sock.close()
        self._listener.close()
        self._poll.close()
        os.close(self._wake)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it went away again, or we are out of descriptors: it will try anew
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers[sock.fileno()] = _Peer(sock)
        self._poll.register(sock, selectors.EVENT_READ)

    def _attend(self, peer: _Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                data = peer.sock.recv(1 << 16)
                if not data:
                    raise ConnectionResetError
                peer.incoming += data
                while (message := take(peer.incoming, MAX_FRAME if peer.greeted else _LONGEST_GREETING)) is not None:
                    peer.outgoing += self._answer(peer, message)
            if peer.outgoing:
                with contextlib.suppress(BlockingIOError):
                    del peer.outgoing[: peer.sock.send(peer.outgoing)]
            if len(peer.outgoing) > _MAX_UNREAD:
                raise ConnectionAbortedError
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
            self._poll.modify(peer.sock, wanted)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ValueError, KeyError, TypeError):
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        fd = peer.sock.fileno()
        self._poll.unregister(peer.sock)
        peer.sock.close()
        for name in peer.owned:
            self._write(name, {**self._records[name], "gone": True})
        del self._peers[fd]

    def _write(self, name: str, record: Record) -> None:
        self._version += 1
        self._records[name], self._texts[name] = record, f"{text(name)}:{text(record)}"
        self._changed[name] = self._version

    def _since(self, version: int) -> str:
        """Return the records that changed after `version`, as JSON: as many as fit, and the version that they reach."""
        news: list[str] = []
        reached, size = self._version, 0
        for changed, name in sorted((changed, name) for name, changed in self._changed.items() if changed > version):
            size += len(self._texts[name])
            if news and size > _MOST_NEWS:
                reached = changed - 1
                break
            news.append(self._texts[name])
        return f'{{"version":{reached},"more":{"true" if reached < self._version else "false"},"records":{{{",".join(news)}}}}}'

    def _answer(self, peer: _Peer, message: dict[str, Any]) -> bytes:
        op = message["op"]
        if op == "hello":
            known = hmac.compare_digest(str(message["run"]).encode(), self._run_id.encode())
            if not known or message["version"] != VERSION:
                return pack({"ok": False})
            if OVER in self._records:
                return pack({"ok": False, "over": True})  # for clients that stay; a new one must not take it for its own end
            peer.greeted = True
            return pack({"ok": True})
        if not peer.greeted:
            raise ValueError("no greeting")
        if op == "changes":
            return frame(self._since(message["since"]))
        name, record = str(message["name"]), dict(message["record"])
        if op == "create" and name in self._records:
            return pack({"ok": False})
        if op == "put":
            peer.owned.add(name)
        self._write(name, record)
        return pack({"ok": True})
