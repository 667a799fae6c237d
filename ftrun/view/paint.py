"""Print styled lines to stdout: in colour through rich on a terminal, as plain text in the pipe's encoding elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ftrun.core.text import printable
from ftrun.view import text

if TYPE_CHECKING:
    from rich.text import Text

_PIPE_WIDTH = 160
# one place for every colour
STYLES = {
    text.PLAIN: "",
    text.STRONG: "bold",
    text.QUIET: "dim",
    text.GOOD: "green",
    text.WARN: "yellow",
    text.BAD: "bold red",
    text.HEAD: "bold",
    text.CHOSEN: "reverse",
    text.CULPRIT: "black on yellow",
    text.FORWARD: "bright_blue",
    text.BACKWARD: "green",
    text.UPDATE: "dark_orange",
    text.BARRIER: "red",
    text.DONE: "bright_green",
    text.CONTROL: "magenta",
}


def output_width() -> int:
    """Return the columns to lay out for: the terminal's; in a pipe COLUMNS, or 160."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if asked.isdigit() and int(asked) else _PIPE_WIDTH


def print_lines(lines: Iterable[text.Line]) -> None:
    """Print to stdout.

    Raises:
        BrokenPipeError: The pipe's reader has gone.
    """
    if not sys.stdout.isatty():
        out = "".join(text.plain(line) + "\n" for line in lines)
        sys.stdout.write(text.for_encoding(out, sys.stdout.encoding))
        sys.stdout.flush()
        return
    from rich.console import Console

    console = Console(highlight=False)
    for line in lines:
        console.print(painted(line), soft_wrap=True)


def painted(*lines: text.Line) -> Text:
    """Convert lines to a rich text."""
    from rich.text import Text

    done = Text(no_wrap=True, overflow="ellipsis", end="")
    for at, line in enumerate(lines):
        if at:
            done.append("\n")
        for part, style in line:
            done.append(text.for_encoding(printable(part), sys.stdout.encoding), STYLES[style])
    return done
