"""Runs a command on a terminal of its own, types into it, and says what stands on the screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyte
import pytest

Then = Callable[["Typist"], None]


class Typist:
    """Someone at a terminal of `rows` x `columns` who started `command`. `raw`: all bytes that came."""

    def __init__(
        self, command: Sequence[str], folder: Path, env: dict[str, str], rows: int = 40, columns: int = 100
    ) -> None:
        self.rows, self.columns, self.raw = rows, columns, b""
        self._start = struct.pack("HHHH", rows, columns, 0, 0)
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            try:
                fcntl.ioctl(0, termios.TIOCSWINSZ, self._start)  # before it looks
                os.chdir(folder)
                os.execve(command[0], list(command), {**env, "TERM": "xterm-256color"})
            finally:
                os._exit(127)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def resize(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, text: str, seconds: float = 60.0) -> None:
        """Wait until `text` stands on the screen."""
        deadline = time.monotonic() + seconds
        while text not in "\n".join(self.screen()):
            if time.monotonic() > deadline or not self._more():
                self.end()
                pytest.fail(f"waited for {text!r}:\n" + "\n".join(self.screen()))

    def wait(self, seconds: float = 60.0) -> int:
        """The exit code."""
        deadline = time.monotonic() + seconds
        while self._more():
            if time.monotonic() > deadline:
                self.end()
                pytest.fail("it does not end:\n" + "\n".join(self.screen()))
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def end(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + 20
            while os.waitpid(self.pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
                self._more()
            os.kill(self.pid, signal.SIGKILL)

    def _more(self) -> bool:
        """Read what is there; False at the end."""
        if select.select([self._fd], [], [], 0.1)[0]:
            try:
                self.raw += os.read(self._fd, 1 << 16)
            except OSError:
                return False
        return True

    def screen(self) -> list[str]:
        """The lines that are not empty."""
        screen = pyte.Screen(self.columns, self.rows)
        pyte.ByteStream(screen).feed(self.raw)
        return [line.rstrip() for line in screen.display if line.strip()]
