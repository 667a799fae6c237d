"""The protocol by which a node gives parts of its ranks' memory to other nodes, over TCP: to replacements, and to copies of snapshots.

A connection begins with a challenge: the server sends 16 bytes, and the client answers with their HMAC-SHA256 under the secret of the
run. Then come requests, each a length of four bytes and one JSON object:

    {"op": "size", "rank": r, "name": n}                       -> {"ok": true, "size": bytes of the segment}
    {"op": "read", "rank": r, "name": n, "ranges": [[at, n]]}  -> {"ok": true}, then each range in chunks
    {"op": "watch", "nonce": text}                             -> {"ended": `ended`}, once the node's launcher and its ranks have ended

Who only watches answers the challenge by another HMAC (`watcher`), with which nothing can be read: a stranger on the port of a node that
has ended may pass the challenge of a living one on to it.

An answer {"ok": false} means that there is no such segment. "device" is the part of an arena on a GPU, which the rank's worker reads
while it lives; "snapshot" are its host snapshots (snapshot_layout.py). A chunk is its length, its checksum
(`ftrun.native.checksum`) and its bytes: TCP's own checksum has 16 bits, too few for gigabytes. A chunk of anything but weights has the
HMAC of its place and bytes behind it: slots are read by `marshal`, which a stranger on the network must not feed.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from ftrun import native
from ftrun.core.shape import loads

CHALLENGE = 16  # bytes
ANSWER = hashlib.sha256().digest_size
CHUNK = 4 << 20  # most bytes of one
HEAD = struct.Struct(">QQ")  # length and checksum of a chunk
_LENGTH = struct.Struct(">I")
PATIENCE = 2.0  # seconds in which a broken connection is made anew
_AGAIN = 0.1  # seconds between two tries
_CONNECT = 5.0  # seconds
_SILENT = 30.0  # seconds in which some bytes must come
_MOST = 1 << 20  # bytes of a request or an answer


def answer(secret: str, challenge: bytes) -> bytes:
    """Return what proves that a client knows the secret."""
    return hmac.digest(secret.encode(), challenge, "sha256")


def watcher(secret: str, challenge: bytes) -> bytes:
    """Return what proves that a client knows the secret, and gives it no right but to watch."""
    return hmac.digest(secret.encode(), b"watch " + challenge, "sha256")


def ended(secret: str, nonce: str) -> str:
    """Return what proves that a guardian of the run says that its node has ended."""
    return hmac.digest(secret.encode(), b"ended " + nonce.encode(), "sha256").hex()


def seal(secret: str, challenge: bytes, rank: int, name: str, at: int, data: bytes | memoryview) -> bytes:
    """Return what proves that a node of the run sent these bytes at this place of a segment, in answer to this connection's challenge.

    b"" for the weights: they are numbers, and hashing gigabytes would take longer than sending them.
    """
    if name in ("arena", "device"):
        return b""
    mac = hmac.new(secret.encode(), challenge + f"{rank} {name} {at} ".encode(), "sha256")
    mac.update(data)
    return mac.digest()


def send(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send a request or an answer. Raises OSError."""
    data = json.dumps(message).encode()
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket) -> dict[str, Any]:
    """Receive one.

    Raises:
        ConnectionError: The peer is gone, or sent something else.
        OSError
    """
    (length,) = _LENGTH.unpack(exactly(sock, _LENGTH.size))
    if length > _MOST:
        raise ConnectionError("the peer sent what is no message of ftrun's")
    try:
        message = loads(exactly(sock, length))
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise ConnectionError("the peer sent what is no message of ftrun's")
    return message


def exactly(sock: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes. Raises OSError, ConnectionError if the peer is gone."""
    data = bytearray(size)
    fill(sock, memoryview(data))
    return bytes(data)


def fill(sock: socket.socket, room: memoryview) -> None:
    """Receive as many bytes as there is room for. Raises OSError, ConnectionError if the peer is gone."""
    at = 0
    while at < len(room):
        got = sock.recv_into(room[at:])
        if not got:
            raise ConnectionError("the peer closed the connection")
        at += got


class FarLine:
    """A client's connection to the node that serves memory at `address` (host, port). One thread uses it.

    If it breaks, or damaged bytes come, it is made anew for PATIENCE seconds, and what was read stays. `patience`: seconds in which the
    constructor tries to connect.

    Raises:
        OSError: By the constructor and each method, if the node cannot be reached or has no such memory.
    """

    def __init__(self, address: tuple[str, int], secret: str, patience: float = 0.0) -> None:
        self._address = address
        self._secret = secret
        self._connect(time.monotonic() + patience)

    def _connect(self, until: float) -> None:
        """Connect, and try again until then."""
        while True:
            try:
                self._sock, self._challenge = self._connected()
                return
            except OSError:
                if time.monotonic() >= until:
                    raise
            time.sleep(_AGAIN)

    def _connected(self) -> tuple[socket.socket, bytes]:
        sock = socket.create_connection(self._address, _CONNECT)
        try:
            sock.settimeout(_SILENT)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            challenge = exactly(sock, CHALLENGE)
            sock.sendall(answer(self._secret, challenge))
        except OSError:
            sock.close()
            raise
        return sock, challenge

    def close(self) -> None:
        self._sock.close()

    def size(self, rank: int, name: str) -> int | None:
        """Return the bytes of a segment, None = there is none."""
        until = None
        while True:
            try:
                send(self._sock, {"op": "size", "rank": rank, "name": name})
                told = receive(self._sock)
                return int(told["size"]) if told.get("ok") else None
            except OSError as error:
                until = self._anew(until, error)

    def read(
        self,
        rank: int,
        name: str,
        ranges: list[tuple[int, int]],
        room: Callable[[int, int], memoryview],
        read: Callable[[int, memoryview], None] = lambda at, part: None,
    ) -> None:
        """Read ranges of a segment into the memory that `room(place, length)` gives for each part. `read` hears of each that is there."""
        left, until = [(at, size) for at, size in ranges if size], None
        while left:
            parts = self._parts(rank, name, [*left], room)
            while left:
                try:
                    at, part = next(parts)
                except OSError as error:
                    until = self._anew(until, error)
                    break
                read(at, part)
                until, size = None, left[0][1] - len(part)
                left[:1] = [(at + len(part), size)] if size else []

    def _parts(
        self, rank: int, name: str, ranges: list[tuple[int, int]], room: Callable[[int, int], memoryview]
    ) -> Iterator[tuple[int, memoryview]]:
        """Ask, and yield what comes: its place, and the bytes. Raises OSError."""
        send(self._sock, {"op": "read", "rank": rank, "name": name, "ranges": ranges})
        if not receive(self._sock).get("ok"):
            raise OSError(f"its node has no {name} of rank {rank} any more")
        for at, size in ranges:
            end = at + size
            while at < end:
                length, checksum = HEAD.unpack(exactly(self._sock, HEAD.size))
                if not 0 < length <= end - at:
                    raise OSError(f"the node of rank {rank} sent what is no part of its {name}")
                part = room(at, length)
                fill(self._sock, part)
                expected = seal(self._secret, self._challenge, rank, name, at, part)
                if not hmac.compare_digest(exactly(self._sock, len(expected)), expected):
                    raise OSError(f"a part of the {name} of rank {rank} was not sent by a node of this run")
                if native.checksum(ctypes.addressof(ctypes.c_char.from_buffer(part)), length) != checksum:
                    raise OSError(f"a part of the {name} of rank {rank} does not match its checksum: it was damaged on the way")
                yield at, part
                at += length

    def _anew(self, until: float | None, error: OSError) -> float:
        """Connect again until then, or for PATIENCE seconds from now on; raise the error if that is over."""
        now = time.monotonic()
        until = now + PATIENCE if until is None else until
        self.close()
        if now > until:
            raise error
        time.sleep(_AGAIN)  # it may have no such memory yet
        self._connect(until)
        return until
