"""Facts that the kernel gives about an open descriptor."""

from __future__ import annotations

import array
import fcntl
import termios


def unread(fd: int) -> int:
    """Bytes that have come into a pipe or a connection and wait.

    Raises:
        OSError
    """
    size = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, size)
    return size[0]
