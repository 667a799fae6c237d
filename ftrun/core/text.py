"""Text from a script, a worker, a file or the network, made safe for a terminal. Every such text passes through here before it is printed.

An exception may hold whatever its script likes: an escape sequence would colour, move or erase what stands on the
screen, a line break would begin a line that looks like ours.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

# control characters (also those of eight bits), what ends a line or turns the direction of writing, halves of a pair
_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LEVELS = {"info": "36", "warning": "33", "error": "31"}  # cyan, yellow, red
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str) -> str:
    r"""The text in one line, with every character that a terminal would obey spelled out, as in \u001b; JSON stays JSON."""
    return _OBEYED.sub(lambda found: _SHORT.get(found[0], f"\\u{ord(found[0]):04x}"), text)


def page(text: str) -> str:
    """`printable` of each line of a text."""
    return "\n".join(map(printable, text.split("\n")))


def coloured(fd: int) -> bool:
    """Is that a terminal on which colours are not forbidden?"""
    return os.isatty(fd) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def sentence(text: str, level: str, colour: bool) -> str:
    """A sentence of ours as a line without its end; `level` is info, warning or error."""
    if not colour:
        return f"ftrun: {printable(text)}"
    begin = _LEVELS[level]
    return f"\x1b[{begin}mftrun: \x1b[0m{printable(text)}" if level == "info" else f"\x1b[{begin}mftrun: {printable(text)}\x1b[0m"


def tell(text: str) -> None:
    """Say a sentence of ours on stderr."""
    level = "error" if text.startswith("error: ") else "info"
    print(sentence(text, level, coloured(2)), file=sys.stderr, flush=True)


def ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2-5`: runs of three or more are drawn together."""
    ordered = sorted(set(numbers))
    parts: list[str] = []
    at = 0
    while at < len(ordered):
        end = at
        while end + 1 < len(ordered) and ordered[end + 1] == ordered[end] + 1:
            end += 1
        if end - at >= 2:
            parts.append(f"{ordered[at]}-{ordered[end]}")
        else:
            parts += [str(n) for n in ordered[at : end + 1]]
        at = end + 1
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(parts)}"
