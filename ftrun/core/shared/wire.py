"""Sends and receives frames between ftrun's processes: one JSON object per SOCK_SEQPACKET message, with file descriptors.

If a frame is too long for a socket (a command line may have a megabyte), the message is only `#`, and the frame lies in memory whose
descriptor comes last.
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
_MOST = 64 << 20  # the most bytes of such a frame: ten times the longest command line that Linux allows
_NAME_BYTES = 107  # the most bytes of a Unix socket's name


class Garbled(ConnectionError):
    """The peer sent data that is no frame. The connection cannot be trusted any more: treat the peer as gone."""


@contextlib.contextmanager
def name_of(path: Path) -> Iterator[str]:
    """Yield an address with which to bind or connect a Unix socket at `path`, however long the names of its folders are.

    Raises:
        OSError: There is no such folder.
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
        OSError: The peer is gone, or there is no memory for a long frame.
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
    """Return a descriptor (close-on-exec) of memory that holds `data`, for `disclose` in another process.

    Raises:
        OSError: The memory cannot be made.
    """
    fd = os.memfd_create("ftrun-frame", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    return fd


def disclose(fd: int) -> bytes:
    """Read the memory of `enclose`, b"" if it cannot be read or is too large; close the descriptor."""
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, size, 0) if size <= _MOST else b""
    except OSError:
        return b""
    finally:
        os.close(fd)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one frame and its descriptors (close-on-exec); return None if the peer is gone.

    Raises:
        Garbled: The message is not one JSON object; its descriptors are closed. It is a ConnectionError.
        OSError: The socket failed.
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
    """Parse the object in a frame; return None for anything else."""
    try:
        message = loads(data)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])
