"""A command in a pseudo-terminal, and what a person would see there (pyte plays the terminal)."""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pyte

KEYS = {
    "up": b"\x1b[A", "down": b"\x1b[B", "right": b"\x1b[C", "end": b"\x1b[F",
    "enter": b"\r", "escape": b"\x1b", "ctrl-z": b"\x1a", "ctrl-c": b"\x03",
}
PATIENCE = 20.0  # seconds


class Terminal:
    """Runs `command` with a terminal of `columns` by `rows` as its stdin, stdout and stderr."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], cwd: Path, columns: int = 100, rows: int = 30
    ) -> None:
        self.screen = pyte.Screen(columns, rows)
        self.raw = b""
        self.began = time.monotonic()
        self._stream = pyte.ByteStream(self.screen)
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            self._resize(0, columns, rows)
            os.chdir(cwd)
            os.execvpe(command[0], list(command), {"TERM": "xterm-256color", **env})
        self._status: int | None = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)

    @staticmethod
    def _resize(fd: int, columns: int, rows: int) -> None:
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int, rows: int) -> None:
        """As a window does it: the program gets SIGWINCH."""
        self._resize(self.fd, columns, rows)
        self.screen.resize(rows, columns)
        os.kill(self.pid, signal.SIGWINCH)

    def press(self, *keys: str) -> None:
        for key in keys:
            os.write(self.fd, KEYS.get(key, key.encode()))

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def pump(self, seconds: float = 0.05) -> bool:
        """Take what the program writes within `seconds`; False once it has closed the terminal."""
        ready, _, _ = select.select([self.fd], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self.fd, 1 << 16)
        except OSError:
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def see(self, what: str | Callable[[], bool]) -> float:
        """Wait until a text, or a condition, is on the screen; gives the seconds since the start."""
        deadline = time.monotonic() + PATIENCE
        while not (what in self.text if isinstance(what, str) else what()):
            assert time.monotonic() < deadline, f"never seen: {what}\n{self.text}"
            assert self.pump(), f"ended without showing {what}\n{self.text}"
        return time.monotonic() - self.began

    def end(self) -> int:
        """Wait for the end; the exit code, 128 + signal for one."""
        deadline = time.monotonic() + PATIENCE
        while self._status is None:
            assert time.monotonic() < deadline, f"does not end\n{self.text}"
            self.pump()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = status
        while self.pump(0.05) and select.select([self.fd], [], [], 0)[0]:
            pass
        return os.waitstatus_to_exitcode(self._status)
