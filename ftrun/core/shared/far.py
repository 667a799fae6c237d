"""The protocol by which a node gives parts of its ranks' memory to a replacement on another node, over TCP.

A connection begins with a challenge: the server sends 16 bytes, and the client answers with their HMAC-SHA256 under the secret of the
run. Then come requests, each a length of four bytes and one JSON object:

    {"op": "size", "rank": r, "name": n}                       -> {"ok": true, "size": bytes of the segment}
    {"op": "read", "rank": r, "name": n, "ranges": [[at, n]]}  -> {"ok": true}, then each range in chunks
    {"op": "watch", "nonce": text}                             -> {"ended": `ended`}, once the node's launcher and its ranks have ended

Who only watches answers the challenge by another HMAC (`watcher`), with which nothing can be read: a stranger on the port of a node that
has ended may pass the challenge of a living one on to it.

An answer {"ok": false} means that there is no such segment. "device" is the part of an arena on a GPU, which the rank's worker reads
while it lives. A chunk is its length, its checksum
(`ftrun.native.checksum`) and its bytes: TCP's own checksum has 16 bits, too few for gigabytes. A chunk of anything but weights has the
HMAC of its place and bytes behind it: slots are read by `marshal`, which a stranger on the network must not feed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
from typing import Any

from ftrun.core.shape import loads

CHALLENGE = 16  # bytes
ANSWER = hashlib.sha256().digest_size
CHUNK = 4 << 20  # most bytes of one
HEAD = struct.Struct(">QQ")  # length and checksum of a chunk
_LENGTH = struct.Struct(">I")
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
