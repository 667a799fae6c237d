"""Lay out styled lines and tables of text for a width. No colour codes here: a style is a name.

A pipe gets the lines plain, a terminal gets them painted.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from ftrun.core.text import printable

# styles, named by meaning; the terminal view maps them to colours
PLAIN, STRONG, QUIET, GOOD, WARN, BAD, HEAD, CHOSEN = "", "strong", "quiet", "good", "warn", "bad", "head", "chosen"
CULPRIT = "culprit"  # a rank that all others wait for
FORWARD, BACKWARD, UPDATE, BARRIER, DONE, CONTROL = "forward", "backward", "update", "barrier", "done", "control"

Span = tuple[str, str]  # text, style
Line = list[Span]

_ASCII = str.maketrans(
    "█▓▒░■▰▏─━═▱·│┃║┆┌┐└┘├┤┬┴┼╭╮╰╯⚡↯→←↑↓▲▼►◄□…×–—✓✗↵▁▂▃▄▅▆▇▚▞◧",
    "#%+:###-----||||+++++++++++++!!><^v^v><.~x--+x>__--==#%%o",
    "°",
)


def plain(line: Line) -> str:
    """Return the line without styles and without trailing blanks."""
    return printable("".join(text for text, _ in line)).rstrip()


def for_encoding(text: str, encoding: str | None) -> str:
    """Return the text itself if `encoding` can encode it, or an ASCII version."""
    try:
        text.encode(encoding or "ascii")
        return text
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII).encode("ascii", "replace").decode()


def width_of(text: str) -> int:
    """Return the columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(line: Line, width: int) -> Line:
    """Cut a line to at most `width` columns; an ellipsis marks the cut."""
    room, kept = width, []
    for text, style in line:
        wide = width_of(text)
        if wide <= room:
            kept.append((text, style))
            room -= wide
            continue
        short = _first(text, room)
        kept.append((short[:-1] + "…" if short else "", style))
        break
    return kept


def _first(text: str, room: int) -> str:
    taken = 0
    for at, char in enumerate(text):
        taken += width_of(char)
        if taken > room:
            return text[:at]
    return text


_LAST_LEAST = 16  # least columns of a table's last column


@dataclass(frozen=True)
class Column:
    """One column of a table. `keep`: its priority when there is no room (the lowest go first)."""

    title: str
    keep: int
    right: bool = False
    most: int = 60
    least: int = 0  # width that it keeps even when empty, so that the table does not jump


def table(columns: Sequence[Column], rows: Sequence[Sequence[Span]], width: int) -> list[Line]:
    """Return the header and the rows, without empty columns and without columns that do not fit."""
    used = [i for i, _ in enumerate(columns) if columns[i].least or any(row[i][0] for row in rows)]
    wide = {
        i: min(columns[i].most, max(columns[i].least, len(columns[i].title), *(width_of(row[i][0]) for row in rows)))
        for i in used
    }
    while len(used) > 1 and _needed([wide[i] for i in used]) > width:
        used.remove(min(used, key=lambda i: columns[i].keep))
    head: Line = [(_padded(columns[i].title, wide[i], columns[i].right, i == used[-1]), HEAD) for i in used]
    lines = [_joined(head)]
    for row in rows:
        cells = [(_padded(row[i][0], wide[i], columns[i].right, i == used[-1]), row[i][1]) for i in used]
        lines.append(_joined(cells))
    return [cut(line, width) for line in lines]


def _needed(wide: Sequence[int]) -> int:
    """Return the least width of a table, whose last column may be cut."""
    *rest, last = wide
    return sum(rest) + min(last, _LAST_LEAST) + 2 * len(rest)


def _padded(text: str, width: int, right: bool, last: bool) -> str:
    if width_of(text) > width:
        text = _first(text, width - 1) + "…"
    blank = " " * (width - width_of(text))
    return blank + text if right else text if last else text + blank


def _joined(cells: Line) -> Line:
    line: Line = []
    for at, cell in enumerate(cells):
        if at:
            line.append(("  ", cell[1] if cell[1] == cells[at - 1][1] else PLAIN))
        line.append(cell)
    return line


def wrapped(sentence: str, width: int, style: str) -> list[Line]:
    """Wrap a sentence into lines; all but the first are indented."""
    return [[(line, style)] for line in textwrap.wrap(sentence, width, subsequent_indent="  ", break_on_hyphens=False)]


_BARS = "▁▂▃▄▅▆▇█"


def spark(values: Sequence[float], top: float) -> str:
    """Draw one character for each value, from 0 to `top`; higher values are clipped."""
    if top <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(len(_BARS) - 1, int(value / top * len(_BARS)))] for value in values)


def chart(values: Sequence[float], top: float, rows: int) -> list[str]:
    """Draw one column for each value over `rows` lines, from 0 to `top`; higher values are clipped."""
    eighths = [round(min(1.0, value / top) * rows * 8) if top > 0 else 0 for value in values]
    lines = []
    for row in range(rows - 1, -1, -1):
        part = [max(0, min(8, e - row * 8)) for e in eighths]
        lines.append("".join(_BARS[p - 1] if p else " " for p in part))
    return lines


def bar(part: float, width: int) -> Line:
    """Return a progress bar `width` columns wide; `part` is clamped to 0 to 1."""
    full = round(max(0.0, min(1.0, part)) * width)
    return [("█" * full, GOOD), ("░" * (width - full), QUIET)]


def duration(seconds: float) -> str:
    """Format seconds for people: 950 ms, 12.3 s, 4:05, 1:02:03, 2 d 3 h."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    if whole < 172800:
        return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
    return f"{whole // 86400} d {whole // 3600 % 24} h"
