"""Shares the terminal of ftrun among all workers: whole lines, and below them one unfinished line.

Theory of operation. The unfinished line, a progress bar or a prompt, stays at the bottom. To write above it, the terminal erases it
(`_lift`), writes whole lines and draws it again. `_stays` decides whether another block takes its place. A part of a line without a
carriage return appears only after PROMPT_AFTER seconds: it is then a prompt, or a slow line. The bytes of a `Plain` worker, the
only one on the console or a debugged one, go to the terminal as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from ftrun.host.output.block import MOST, Block, height

PROMPT_AFTER = 0.1  # seconds until an unfinished line appears


class Timers(Protocol):
    """The timers of the event loop."""

    def after(self, seconds: float, handler: Callable[[], None]) -> None: ...


class Terminal:
    """Draws on one terminal. `write` takes bytes in order; `fd` serves to ask for the size."""

    def __init__(self, fd: int, write: Callable[[bytes], None], timers: Timers) -> None:
        self._fd = fd
        self._write = write
        self._timers = timers
        self._last: Block | Plain | None = None  # the worker of the lines at the bottom

    def size(self) -> os.terminal_size:
        """Return the terminal's size; 80 x 24 when it does not know it (0 x 0: a serial line, a container's)."""
        try:
            columns, lines = os.get_terminal_size(self._fd)
        except OSError:
            columns, lines = 0, 0
        return os.terminal_size((columns or 80, lines or 24))

    # -- input -------------------------------------------------------------------------------------------------------

    def message(self, line: bytes) -> None:
        """Write a whole line of ours."""
        self._above([line.removesuffix(b"\n")])

    def feed(self, one: Block | Plain, data: bytes) -> None:
        """Take `data` that a worker wrote."""
        if isinstance(one, Plain):
            self._pass_on(one, data)
        else:
            self._take(one, data)

    def _take(self, block: Block, data: bytes) -> None:
        for one in (block, block.twin):
            if one is not None and one.asked:
                one.answered()
                if self._last is one:
                    self._last = None
        number, was = block.number, block.hold
        block.feed(data)
        standing = self._last is block and bool(block.drawn) and block.drawn[-1] != b"" and number == block.number
        block.hold = block.is_open and not block.moving and not standing
        if block.hold and not (was and number == block.number):
            self._timers.after(PROMPT_AFTER, lambda n=block.number: self._overdue(block, n))  # type: ignore[misc]
        self._show(block)

    def _pass_on(self, plain: Plain, data: bytes) -> None:
        out = b"" if self._last is plain else self._lift()
        self._last = plain
        plain.tail = (plain.tail + data)[(plain.tail + data).rfind(b"\n") + 1 :][-_TAIL:]
        self._write(out + data)

    def finish(self, one: Block | Plain) -> None:
        """End the worker's unfinished line: the worker writes no more."""
        if isinstance(one, Plain):
            if self._last is one:
                self._write(b"\n" if one.tail else b"")
                self._last = None
            return
        one.hold = False
        if one.is_open:
            one.at = len(one.rows) - 1
            one.feed(b"\n")
            self._show(one)
        if self._last is one:
            self._last = None

    def _overdue(self, block: Block, number: int) -> None:
        if not block.hold or block.number != number:
            return
        if block.more():
            if block.hold and block.number == number:  # the worker is still writing it
                self._timers.after(PROMPT_AFTER, lambda: self._overdue(block, number))
            return
        block.hold, block.asked = False, block.asks()
        self._show(block)

    # -- drawing -----------------------------------------------------------------------------------------------------

    def _show(self, block: Block) -> None:
        if self._last is block:
            self._again(block)
            return
        shown, stays = block.visible(), self._stays(block)
        if not stays:
            out = self._lift()
            self._last, block.drawn = block, shown
            self._write(out + b"\n".join(shown))
        elif len(shown) > 1:
            block.at = max(block.at, len(block.rows) - 1)
            self._above(shown[:-1])
            block.settle()
        block.trim(self._most())

    def _stays(self, block: Block) -> bool:
        """Does the line at the bottom stay there when `block` has rows to draw?"""
        last = self._last
        if last is None or not _is_open(last):
            return False
        if not block.is_open or block.hold:
            return True
        if not last.moving:  # a prompt gives way to another one only
            return block.moving
        return block.moving and isinstance(last, Block) and block.order > last.order

    def _again(self, block: Block) -> None:
        """Redraw the changed rows of the block at the bottom; the cursor is at the end of its last row."""
        new, old = block.visible(), block.drawn or [b""]
        same = next((i for i, (a, b) in enumerate(zip(new, old, strict=False)) if a != b), min(len(new), len(old)))
        if same == len(old):
            out = b"".join(b"\n" + row for row in new[same:])
        elif same == len(old) - 1 and not old[same]:
            out = b"\n".join(new[same:])
        else:
            same = min(same, len(new) - 1)
            out = self._back(old[same:]) + b"\n".join(new[same:])
        block.drawn = new
        block.trim(self._most())
        self._write(out)

    def _above(self, lines: Sequence[bytes]) -> None:
        """Write whole lines above the unfinished line at the bottom."""
        last = self._last
        out = self._lift() + b"".join(line + b"\n" for line in lines)
        if isinstance(last, Plain):
            out += last.tail
        elif last is not None and _is_open(last):
            last.drawn = last.visible()
            out += b"\n".join(last.drawn)
        else:
            self._last = None
        self._write(out)

    def _lift(self) -> bytes:
        """Return the codes that erase the line at the bottom, or that leave it if a person may have typed behind it."""
        last = self._last
        if last is None:
            return b""
        if isinstance(last, Plain):
            return b"" if not last.tail else b"\r\x1b[K" if last.moving else b"\n"
        drawn = last.drawn[last.at :] if last.drawn else []
        last.settle()
        if not drawn or drawn == [b""]:
            return b""
        return b"\n" if last.asked else self._back(drawn)

    def _back(self, rows: Sequence[bytes]) -> bytes:
        """Return the codes that move from the end of the last of these rows to the beginning of the first and erase to the end."""
        columns = self.size().columns
        up = sum(height(row, columns) for row in rows) - 1
        return b"\r" + (b"\x1b[%dA" % up if up else b"") + b"\x1b[J"

    def _most(self) -> int:
        return max(1, min(MOST, self.size().lines - 1))


_TAIL = 4096  # bytes of an unfinished line that the terminal writes again


class Plain:
    """Represents a worker whose bytes go to the terminal as they are. `tail`: the end of its unfinished last line."""

    def __init__(self) -> None:
        self.tail = b""

    @property
    def moving(self) -> bool:
        return b"\r" in self.tail


def _is_open(one: Block | Plain) -> bool:
    return bool(one.tail) if isinstance(one, Plain) else one.is_open and not one.hold
