"""Frames between our processes: one JSON object a SOCK_SEQPACKET message, file descriptors beside it.

A message too long for a socket, such as a command line of a megabyte, lies in memory whose descriptor is sent in its place.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ftrun.core.shape import loads

MAX_FRAME = 128 * 1024
MAX_FDS = 16
_ENCLOSED = b"#"  # the whole message: the frame lies in the last descriptor
_MOST = 64 << 20  # bytes of such a frame: ten times the longest command line that Linux allows
_NAME_BYTES = 107  # that the name of a Unix socket may have


class Garbled(ConnectionError):
    """The peer sent something that is no frame. Nothing after it on that connection can be trusted: it is as good as gone."""


@contextlib.contextmanager
def name_of(path: Path) -> Iterator[str]:
    """The address with which to bind or connect a Unix socket at `path`, however long the names of its folders are.

    Raises:
        OSError: When the folder is not there.
    """
    if len(os.fsencode(path)) <= _NAME_BYTES:
        yield os.fspath(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one frame.

    Raises:
        OSError
    """
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) <= MAX_FRAME:
        _send(sock, data, fds)
        return
    enclosed = enclose(data)
    try:
        _send(sock, _ENCLOSED, (*fds, enclosed))
    finally:
        os.close(enclosed)


def _send(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary)


def enclose(data: bytes) -> int:
    """A descriptor (close-on-exec) of memory that holds `data`, for `disclose` in another process.

    Raises:
        OSError
    """
    fd = os.memfd_create("ftrun-frame", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    return fd


def disclose(fd: int) -> bytes:
    """Read what `enclose` put there, b"" when it is nothing of ours; close the descriptor."""
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, size, 0) if size <= _MOST else b""
    except OSError:
        return b""
    finally:
        os.close(fd)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one frame and the descriptors with it (close-on-exec); None when the peer is gone.

    Raises:
        Garbled: (a ConnectionError) for anything but one JSON object, whose descriptors are closed then.
        OSError
    """
    space = socket.CMSG_SPACE((MAX_FDS + 1) * array.array("i").itemsize)
    data, ancillary, _, _ = sock.recvmsg(MAX_FRAME, space, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, body in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(body[: len(body) - len(body) % numbers.itemsize])
            fds.extend(numbers)
    if data == _ENCLOSED and fds:
        data = disclose(fds.pop())
    message = _object(data)
    if message is not None:
        return message, fds
    for fd in fds:
        os.close(fd)
    if data:
        raise Garbled(f"{len(data)} bytes came that are no frame")
    return None


def _object(data: bytes) -> dict[str, Any] | None:
    """The object in a frame, None when it is none."""
    try:
        message = loads(data)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def peer_uid(sock: socket.socket) -> int:
    """User id of the process at the other end of a Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])
