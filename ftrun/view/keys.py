"""Read single keys from a terminal, and restore the terminal's settings at the end, on Ctrl-Z and after an exception."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import termios
import time
import tty
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

UP, DOWN, LEFT, RIGHT, ENTER, ESCAPE = "up", "down", "left", "right", "enter", "escape"
PAGE_UP, PAGE_DOWN, HOME, END = "page up", "page down", "home", "end"
_SEQUENCES = {
    b"\x1b[A": UP,
    b"\x1bOA": UP,
    b"\x1b[B": DOWN,
    b"\x1bOB": DOWN,
    b"\x1b[C": RIGHT,
    b"\x1bOC": RIGHT,
    b"\x1b[D": LEFT,
    b"\x1bOD": LEFT,
    b"\x1b[5~": PAGE_UP,
    b"\x1b[6~": PAGE_DOWN,
    b"\x1b[H": HOME,
    b"\x1bOH": HOME,
    b"\x1b[F": END,
    b"\x1bOF": END,
    b"\r": ENTER,
    b"\n": ENTER,
    b"\x1b": ESCAPE,
}
_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|\x1b|[\r\n\x20-\x7e]")


class Keyboard:
    """Reads keys from `fd`, a terminal in cbreak mode. A resize of the window and `fg` after Ctrl-Z end a `wait` early."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._gone = False

    @property
    def gone(self) -> bool:
        """Has the terminal been closed?"""
        return self._gone

    def wait(self, seconds: float) -> list[str]:
        """Wait up to `seconds` for keys and return them; return early with none if the screen must be drawn again."""
        ready, _, _ = select.select([self._fd, self._wake_r], [], [], max(0.0, seconds))
        if self._wake_r in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_r, 256)
        if self._fd not in ready:
            return []
        try:
            data = os.read(self._fd, 64)
        except OSError:
            data = b""
        if not data:
            self._gone = True
            return ["q"]
        found = [_SEQUENCES.get(part) or part.decode("ascii", "ignore") for part in _KEY.findall(data)]
        return [key for key in found if key.isprintable() and key]

    def wake(self, *_: object) -> None:
        """Make `wait` return; safe in a signal handler."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"!")

    def close(self) -> None:
        os.close(self._wake_r)
        os.close(self._wake_w)


@contextlib.contextmanager
def terminal(fd: int, leave: Callable[[], None], enter: Callable[[], None]) -> Iterator[Keyboard]:
    """Put `fd` into single-key mode within the context. `leave` and `enter` release and retake the screen around Ctrl-Z."""
    before = termios.tcgetattr(fd)
    keyboard = Keyboard(fd)

    def stop(signum: int, frame: FrameType | None) -> None:
        leave()
        termios.tcsetattr(fd, termios.TCSANOW, before)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # the process is stopped here until `fg`
        signal.signal(signal.SIGTSTP, stop)
        _wait_foreground(fd)
        tty.setcbreak(fd, termios.TCSANOW)
        enter()
        keyboard.wake()

    handlers: dict[int, Any] = {
        signal.SIGTSTP: stop,
        signal.SIGWINCH: keyboard.wake,
        signal.SIGTERM: _terminated,
        signal.SIGHUP: _terminated,
    }
    saved = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        tty.setcbreak(fd, termios.TCSANOW)
        yield keyboard
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSANOW, before)
        for signum, handler in saved.items():
            signal.signal(signum, handler)
        keyboard.close()


def _terminated(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _wait_foreground(fd: int) -> None:
    """Wait until this process group owns the terminal: after `bg` another group owns it."""
    while True:
        try:
            if os.tcgetpgrp(fd) == os.getpgrp():
                return
        except OSError:
            return
        time.sleep(0.1)
