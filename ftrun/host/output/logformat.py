"""Formats a worker's line for the console, with a prefix or as a JSON object. Pure but for the clock.

Log files keep the worker's bytes; only the console and the filtered files have prefixes.
"""

from __future__ import annotations

import json
import os
import re
import string
import time
from dataclasses import dataclass
from typing import Any, Protocol

from ftrun.core.errors import UsageError
from ftrun.core.text import printable, sentence
from ftrun.host.base.settings import Output
from ftrun.host.base.streams import Std

STREAMS = {"stdout": Std.OUT, "stderr": Std.ERR}
FIELDS = ("role", "local_rank", "rank", "host", "run", "attempt")
_TORCHRUN_FIELDS = {"role_name": "role", "local_rank": "local_rank", "rank": "rank", "hostname": "host"}


@dataclass(frozen=True)
class LogPlace:
    """Names the origin of a line: incarnation `cell` in its `attempt`; `local_rank` None: a spare."""

    cell: int
    local_rank: int | None
    attempt: int

    @property
    def folder(self) -> str:
        return f"spare-{self.cell}" if self.local_rank is None else str(self.local_rank)


class Style(Protocol):
    """Renders whole lines (ends included) for the console."""

    def render(self, lines: list[bytes]) -> bytes: ...


def check_template(option: str, text: str) -> str:
    """Return `text` if it can be a prefix.

    Raises:
        UsageError: It is no template; the message names `option`.
    """
    known = ", ".join(f"{{{name}}}" for name in FIELDS)
    try:
        for _, name, _, _ in string.Formatter().parse(text):
            if name is not None and name not in FIELDS:
                raise UsageError(f"{option}: {{{name}}} in {text!r} is unknown; known are {known}")
        text.format(**dict.fromkeys(FIELDS, "0"))
    except ValueError as error:
        raise UsageError(
            f"{option}: {text!r} is not a template ({error}); write {{{{ for a brace; known fields, all text: {known}"
        ) from None
    return text


def torchrun_template(text: str) -> str:
    """Translate torchrun's template ("[${role_name}${rank}]:", a `string.Template`) to ours; unknown names stay."""
    done, at = "", 0
    for match in string.Template("").pattern.finditer(text):
        field = _TORCHRUN_FIELDS.get(match["braced"] or match["named"] or "")
        done += _escaped(text[at : match.start()])
        done += f"{{{field}}}" if field else _escaped("$" if match["escaped"] else match.group())
        at = match.end()
    return done + _escaped(text[at:])


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def on_console(output: Output, local_rank: int, stream: str) -> bool:
    """Does the console get this stream of that rank?"""
    if output.filter and local_rank not in output.filter:
        return False
    asked = STREAMS[stream]
    return not output.redirects.of(local_rank) & asked or bool(output.tee.of(local_rank) & asked)


class Format:
    """Formats lines by the options of a run. `rank_offset`: rank of this node's local rank 0; `workers`: number of ranks of this node."""

    def __init__(self, output: Output, run: str, role: str, workers: int = 0, debug_rank: int | None = None) -> None:
        self.rank_offset = 0
        self.debug_rank = debug_rank
        self._workers = workers
        self._output = output
        self._run = run
        self._role = role
        self._host = os.uname().nodename
        self._filters = {
            "stdout": [f.encode(errors="surrogateescape") for f in output.stdout_filters],
            "stderr": [f.encode(errors="surrogateescape") for f in output.stderr_filters],
        }

    def shown(self, place: LogPlace, stream: str) -> bool:
        """Does the console get this stream? Text leaves out spares, which print the same as the ranks; JSON and the files do not."""
        if place.local_rank is None and self._output.format != "json":
            return False
        return self.on_console(place, stream)

    def on_console(self, place: LogPlace, stream: str) -> bool:
        """Does the console get this stream? A spare counts as a rank that no option names."""
        return on_console(self._output, _number(place), stream)

    def prefix(self, place: LogPlace, stream: str) -> bytes:
        output, spare = self._output, f"spare{place.cell}"
        rank = None if place.local_rank is None else place.local_rank + self.rank_offset
        if output.template:
            text = output.template.format(
                role=self._role,
                local_rank=spare if rank is None else str(place.local_rank),
                rank=spare if rank is None else str(rank),
                host=self._host,
                run=self._run,
                attempt=str(place.attempt),
            )
        elif output.tee.of(_number(place)) & STREAMS[stream]:
            text = f"[{self._role}{spare if rank is None else place.local_rank}]:"
        else:
            text = f"[spare {place.cell}] " if rank is None else f"[rank {rank}] "
        return text.encode(errors="surrogateescape")

    def needs_no_prefix(self, place: LogPlace) -> bool:
        """Is this the only worker on the console, or the one that a person debugs?"""
        output = self._output
        if place.local_rank is None or output.template or output.tee:
            return False
        if self.debug_rank is not None:
            return place.local_rank + self.rank_offset == self.debug_rank
        return output.filter == (place.local_rank,) or (self._workers == 1 and not output.filter)

    def style(self, place: LogPlace, stream: str) -> Style:
        if self._output.format != "json":
            return _Text(self.prefix(place, stream))
        rank = None if place.local_rank is None else place.local_rank + self.rank_offset
        facts = {"run": self._run, "rank": rank, "local_rank": place.local_rank, "role": self._role}
        if place.local_rank is None:
            facts["spare"] = place.cell
        return _Json({**facts, "stream": stream, "attempt": place.attempt})

    def wanted(self, stream: str) -> list[bytes]:
        """Return the filters of `stream`: a line that contains one of them also goes to the filtered file."""
        return self._filters[stream]

    def message(self, line: str, level: str, colour: bool = False) -> bytes:
        """Format a message of our own, in colours for a terminal."""
        if self._output.format == "json":
            return _Json({"run": self._run, "stream": "ftrun", "level": level}).one(line)
        return f"{sentence(line, level, colour)}\n".encode()


class _Text:
    """Puts the worker's prefix before each line; nothing in a line can move before the prefix, erase it or hide it."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix

    def render(self, lines: list[bytes]) -> bytes:
        prefix = self._prefix
        return b"".join([prefix + (tamed(line) if _OBEYED.search(line) else line) for line in lines])


# a terminal obeys: a sequence (whole or cut off), a control character of 7 bits, one of 8 bits in UTF-8
_SEQUENCE = rb"\x1b\[[0-?]*[ -/]*[@-~]?|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?"
_CONTROL = re.compile(_SEQUENCE + rb"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_CONTROL_8 = re.compile(rb"\xc2[\x80-\x9f]")
_OBEYED = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")
_COLOUR = re.compile(rb"\x1b\[[0-9;:]*m")
_LINE_END = re.compile(rb"\r?\n?$")


def tamed(line: bytes) -> bytes:
    """Remove all control codes from a line except colours, and end the colours with the line."""
    line = _CONTROL.sub(lambda found: found[0] if _COLOUR.fullmatch(found[0]) else b"", line)
    line = _CONTROL_8.sub(b"?", line)
    return _LINE_END.sub(lambda end: b"\x1b[0m" + end[0], line, count=1) if b"\x1b" in line else line


class _Json:
    """Writes one JSON object for each line: the time, `facts`, and the line."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self._facts = json.dumps(facts, ensure_ascii=False)[1:-1]

    def render(self, lines: list[bytes]) -> bytes:
        head = self._head()
        return b"".join([self._object(head, line.decode(errors="replace").rstrip("\r\n")) for line in lines])

    def one(self, line: str) -> bytes:
        return self._object(self._head(), line)

    def _head(self) -> str:
        now = time.time()
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        return f'{{"time": "{seconds}.{int(now % 1 * 1000):03d}Z", {self._facts}, "line": '

    def _object(self, head: str, line: str) -> bytes:
        return printable(f"{head}{json.dumps(line, ensure_ascii=False)}}}").encode() + b"\n"


def _number(place: LogPlace) -> int:
    """Return the local rank under which to look options up; no option names the one of a spare."""
    return -1 if place.local_rank is None else place.local_rank
