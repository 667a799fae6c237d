"""Keeps the newest rows of one worker as a terminal would display them: obeys carriage returns, erasures and moves up. Pure.

A worker that draws a progress bar, or redraws a table, changes rows that it has drawn before.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from ftrun.host.output.logformat import tamed

MOST = 50  # rows up to which a worker may go back
_LONGEST = 4096  # bytes of an unfinished terminal sequence
_COLOUR = re.compile(rb"\x1b\[[0-9;:]*m")
_STRING = rb"\x1b[\]PX^_][^\x07\x1b]*"  # a window title and the like, which a terminator ends
_TOKEN = re.compile(
    rb"(?P<text>[^\x00-\x1f\x7f]+|\t)"
    rb"|(?P<order>\x1b\[(?P<number>[0-9;:?<=>]*)[ -/]*(?P<name>[@-~]))"
    rb"|(?P<rest>(?:\x1b(?:\[[0-?]*[ -/]*)?|" + _STRING + rb")\Z)"
    rb"|" + _STRING + rb"(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]"
    rb"|(?P<control>.)",
    re.DOTALL,
)


@dataclass
class DrawnLine:
    """Holds one row. `moving`: the worker has redrawn it, so it is a progress bar and no prompt."""

    text: bytes = b""
    moving: bool = False
    again: bool = False  # the next text replaces this one


class Block:
    """Holds the rows of one stream. The last row is unfinished. Of two simultaneous bars the terminal displays the one of lower `order`."""

    def __init__(self, prefix: bytes, order: int) -> None:
        self.prefix = prefix
        self.order = order
        self.rows = [DrawnLine()]
        self.at = 0  # the row in which the worker writes
        self.drawn: list[bytes] = []  # the rows as they stand on the terminal
        self.hold = False  # do not draw the last row yet: it may be only a part of a line
        self.number = 0  # counts rows; the number of the last one
        self.asks: Callable[[], bool] = lambda: False  # does the worker wait for a person's input?
        self.more: Callable[[], bool] = lambda: False  # reads the worker's newest output: was there any?
        self.asked = False  # the last row is a question; the person's answer ends the line
        self.twin: Block | None = None  # the worker's other stream
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Apply `data` that the worker wrote to the rows."""
        data, self._rest = self._rest + data, b""
        for token in _TOKEN.finditer(data):
            if token["text"]:
                row = self.rows[self.at]
                row.text = token["text"] if row.again else row.text + token["text"]
                row.again = False
            elif token["order"]:
                self._obey(token["order"], token["name"], token["number"])
            elif token["rest"]:
                self._rest = token["rest"][:_LONGEST]
            elif token["control"]:
                self._control(token["control"])

    def _control(self, what: bytes) -> None:
        row = self.rows[self.at]
        if what == b"\n":
            row.again = False
            self.at += 1
            if self.at == len(self.rows):
                self.rows.append(DrawnLine())
                self.number += 1
            else:
                self.rows[self.at].again = True
        elif what == b"\r":
            row.again = row.moving = True
        elif what == b"\b":
            row.text, row.moving = row.text[:-1], True

    def _obey(self, order: bytes, name: bytes, number: bytes) -> None:
        row = self.rows[self.at]
        if name == b"m":
            if _COLOUR.fullmatch(order):
                row.text = order if row.again else row.text + order
                row.again = False
        elif name in b"ABEF":
            to = self.at + _count(number) * (-1 if name in b"AF" else 1)
            self.at = min(max(0, to), len(self.rows) - 1)
            self.rows[self.at].again = True
            for below in self.rows[self.at :]:
                below.moving = True
        elif name == b"K" and (row.again or number == b"2"):
            row.text = b""
        elif name == b"J" and number in (b"", b"0"):
            del self.rows[self.at + 1 :]
            if row.again:
                row.text = b""

    def visible(self) -> list[bytes]:
        """Return the rows to draw; the last one is empty if it has no text or is held back."""
        texts = [row.text for row in self.rows]
        shown = [self.prefix + (tamed(text) if b"\x1b" in text or b"\xc2" in text else text) for text in texts]
        if self.hold or not self.is_open:
            shown[-1] = b""
        return shown

    @property
    def is_open(self) -> bool:
        """Has the last row text, or does the worker write in a row above it?"""
        return bool(_COLOUR.sub(b"", self.rows[-1].text).strip()) or self.at < len(self.rows) - 1

    @property
    def moving(self) -> bool:
        return self.rows[-1].moving

    def settle(self) -> None:
        """Forget the rows above the one in which the worker writes: they stay on the terminal as they are."""
        self.rows, self.at, self.drawn = self.rows[self.at :], 0, []

    def answered(self) -> None:
        """Begin a new row, after the person's input ended the line of the question."""
        self.rows, self.at, self.drawn, self.asked = [DrawnLine()], 0, [], False
        self.number += 1

    def trim(self, most: int) -> None:
        """Keep the last `most` rows."""
        over = len(self.rows) - most
        if over > 0:
            self.rows, self.drawn, self.at = self.rows[over:], self.drawn[over:], max(0, self.at - over)


def _count(number: bytes) -> int:
    return max(1, int(number)) if number.isdigit() else 1


def height(row: bytes, columns: int) -> int:
    """Return the number of lines that a row takes on a terminal of `columns` columns."""
    text = _COLOUR.sub(b"", row).decode(errors="replace").expandtabs()
    if text.isascii():
        cells = len(text)
    else:
        cells = sum(
            0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
        )
    return max(1, -(-cells // max(1, columns)))
