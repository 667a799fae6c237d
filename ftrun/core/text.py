"""Makes text from a script, a worker, a file or the network safe for a terminal. All such text passes through here before ftrun prints it.

An exception's text may hold any characters: an escape sequence would colour, move or erase text on the screen, and a line
break would begin a line that looks like ftrun's.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

# control characters (also 8-bit ones), line ends, changes of the writing direction, surrogates
_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LEVELS = {"info": "36", "warning": "33", "error": "31"}  # cyan, yellow, red
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str) -> str:
    r"""Return the text in one line and escape every character that a terminal would obey, as in \u001b; JSON stays JSON."""
    return _OBEYED.sub(lambda found: _SHORT.get(found[0], f"\\u{ord(found[0]):04x}"), text)


def page(text: str) -> str:
    """Apply `printable` to each line of a text."""
    return "\n".join(map(printable, text.split("\n")))


def coloured(fd: int) -> bool:
    """Is descriptor `fd` a terminal, and are colours allowed (NO_COLOR, TERM)?"""
    return os.isatty(fd) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def sentence(text: str, level: str, colour: bool) -> str:
    """Format a message of ftrun's as one line without the line end; `level` is info, warning or error."""
    if not colour:
        return f"ftrun: {printable(text)}"
    begin = _LEVELS[level]
    return f"\x1b[{begin}mftrun: \x1b[0m{printable(text)}" if level == "info" else f"\x1b[{begin}mftrun: {printable(text)}\x1b[0m"


def tell(text: str) -> None:
    """Print a message of ftrun's on stderr."""
    level = "error" if text.startswith("error: ") else "info"
    print(sentence(text, level, coloured(2)), file=sys.stderr, flush=True)


def ranks(numbers: Sequence[int]) -> str:
    """Format ranks: `rank 3`, `ranks 0, 2-5`; three or more consecutive ranks become a range."""
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
