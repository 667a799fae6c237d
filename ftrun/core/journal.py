"""Reads a journal, also while the launcher writes it (ftrun.host.rundir.journal)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ftrun.core.shape import loads

_CHUNK = 1 << 20


class Tail:
    """A reader of a journal's complete lines: `read` yields the lines that were added since the last call.

    It keeps the file open, so that it can read the last lines of a run after the run's directory is gone.

    Raises:
        OSError: The file cannot be opened or read.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._torn = b""

    def read(self) -> Iterator[bytes]:
        while chunk := os.read(self._fd, _CHUNK):
            *whole, self._torn = (self._torn + chunk).split(b"\n")
            yield from whole

    def close(self) -> None:
        os.close(self._fd)


def whole(line: bytes) -> dict[str, Any] | None:
    """Parse one line; return None if it is damaged."""
    try:
        raw = loads(line)
    except ValueError:
        return None
    return raw if isinstance(raw, dict) else None


def lines(path: Path, parse: Callable[[bytes], dict[str, Any] | None] = whole) -> Iterator[dict[str, Any]]:
    """Yield every readable line of a journal.

    Raises:
        OSError: The file cannot be opened or read.
    """
    tail = Tail(path)
    try:
        yield from filter(None, map(parse, tail.read()))
    finally:
        tail.close()
