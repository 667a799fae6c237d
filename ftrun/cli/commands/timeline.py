"""`ftrun timeline`: one incident drawn, or the whole run as a trace. Exit code 0, 2 usage, 4 no such run or incident."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ftrun.cli.main import app
from ftrun.core.amounts import count
from ftrun.core.errors import FtrunError, NoRunError, PlatformError, UsageError
from ftrun.core.text import page, printable, tell

if TYPE_CHECKING:
    from ftrun.view.find import Found
    from ftrun.view.journal import History
    from ftrun.view.text import Line
    from ftrun.view.timeline.model import Story

FORMATS = ("text", "svg", "html", "trace")
EPILOG = (
    "Examples: `ftrun timeline` tells of the last incident of the newest run; `ftrun timeline brave-otter --incident 1 "
    "--format svg -o incident.svg` draws one; `ftrun timeline --format trace -o run.json` is for ui.perfetto.dev. "
    "RUN may also be the log folder or journal of a run that ended. Exit code: 0, 2 usage, 4 no such run or incident."
)


@app.command(
    "timeline", help="Tell and draw an incident: which rank failed, when, why, and what it cost.", epilog=EPILOG
)
def timeline(
    run_id: str = typer.Argument(None, metavar="RUN", help="The run's name, or the folder of its logs."),
    incident: int = typer.Option(None, "--incident", metavar="N", help="Which one, from 1 (default: the last)."),
    form: str = typer.Option("text", "--format", metavar="|".join(FORMATS), help="The form of the drawing."),
    output: str = typer.Option(None, "-o", "--output", metavar="FILE", help="Write to a file instead of stdout."),
    as_json: bool = typer.Option(False, "--json", help="The incident as JSON."),
) -> int:
    from ftrun.view.find import require
    from ftrun.view.finished import read

    if form not in FORMATS:
        raise UsageError(f"--format must be one of {', '.join(FORMATS)}, not {form!r}")
    if as_json and form != "text":
        raise UsageError("--json and --format do not go together")
    found = require(run_id)
    try:
        if form == "trace":
            return _trace(found, output)
        history = read(found)
        if not history.config:
            raise PlatformError(f"{found.journal} has no line that a run began with: it is no journal, or was damaged")
    except OSError as error:
        raise PlatformError(f"cannot read {found.journal}: {error.strerror}") from None
    if history.unread:
        tell(f"{found.journal}: {count(history.unread, 'line')} unlike those of this version passed over")
    account = history.account
    if form == "text" and not as_json and incident is None and history.newest_is_elsewhere:
        return _elsewhere(found, history, output)
    number = len(account.incidents) if incident is None else incident
    if not 1 <= number <= len(account.incidents):
        return _nothing(found, history, incident, form, as_json)
    if as_json:
        facts = {"schema": 1, "run": found.run_id, **account.incidents[number - 1], "nodes": history.on_nodes(number)}
        _write(json.dumps(facts, indent=2) + "\n", output)
        return 0
    return _draw(found, history, number, form, output)


def _draw(found: Found, history: History, number: int, form: str, output: str | None) -> int:
    from ftrun.view.timeline.model import story

    told = story(history.account, number, found.run_id)
    if form == "text":
        return _text(told, history, output)
    if form == "svg":
        from ftrun.view.timeline.svg import document
    else:
        from ftrun.view.timeline.html import document
    _write(document(told), output)
    return 0


def _text(told: Story, history: History, output: str | None) -> int:
    from ftrun.view import text
    from ftrun.view.timeline.nodes import rows
    from ftrun.view.timeline.terminal import drawing

    def lines(width: int) -> list[text.Line]:
        on_nodes = history.on_nodes(told.number)
        return [*drawing(told, width), *([[], *rows(on_nodes, width)] if on_nodes else [])]

    return _print(lines, _others(history), output)


def _elsewhere(found: Found, history: History, output: str | None) -> int:
    """Tell of the newest incident of several nodes, in which no rank of this one failed."""
    from ftrun.view.timeline.nodes import rows, title

    incident = history.on_nodes(None)
    return _print(lambda width: [*title(incident, found.run_id), *rows(incident, width)], _others(history), output)


def _others(history: History) -> list[str]:
    """The words on further incidents."""
    own = len(history.account.incidents)
    elsewhere = sum(all(note["own"] is None for note in notes) for notes in history.nodes.values())
    if elsewhere:
        here = f"; {own} with failed ranks of this one: --incident N" if own else ""
        return [f"{count(elsewhere, 'incident')} in which only ranks of other nodes failed, each in ftrun events{here}"]
    return [f"{own} incidents in all; another one: --incident N"] if own > 1 else []


def _print(lines: Callable[[int], list[Line]], more: list[str], output: str | None) -> int:
    from ftrun.view import text
    from ftrun.view.paint import output_width, print_lines

    if output is not None:
        _write("".join(text.plain(line) + "\n" for line in lines(120)), output)
        return 0
    print_lines([*lines(min(output_width(), 132)), *([[], *([(said, text.QUIET)] for said in more)] if more else [])])
    return 0


def _trace(found: Found, output: str | None) -> int:
    from ftrun.core.journal import lines
    from ftrun.view.journal import parse
    from ftrun.view.timeline.trace import document

    _write(document(lines(found.journal, parse), found.run_id), output)
    return 0


def _nothing(found: Found, history: History, asked: int | None, form: str, as_json: bool) -> int:
    if asked is not None:
        incidents = history.account.incidents
        have = f"it had {len(incidents)}" if incidents else "it had none"
        raise NoRunError(f"run {found.run_id} has no incident {asked}; {have}")
    said = _none_because(found, history)
    if form == "text" and not as_json:
        print(printable(f"run {found.run_id}: {said}"))
        return 0
    raise NoRunError(f"run {found.run_id} had no incident that could be drawn; {said}")


def _none_because(found: Found, history: History) -> str:
    """The reason why there is no incident to draw, which is not always good news."""
    more = f"; what there is: ftrun events {found.run_id if found.live else found.journal.parent}"
    account = history.account
    if history.unread:
        return f"no incident in the lines that could be read{more}"
    if account.since is not None and found.live:
        return f"no incident is over yet, and one is being repaired just now: ftrun status {found.run_id}"
    if account.since is not None:
        return f"it was cut off while an incident was being repaired{more}"
    if history.nodes:
        return f"no rank of this node failed{more}"
    if found.live or account.exit_code == 0:
        return "no incident, nothing failed"
    if account.exit_code is None:
        return f"no incident up to where its journal ends, and it was cut off there{more}"
    return f"no incident was repaired, and it ended with exit code {account.exit_code}{more}"


def _write(data: str, output: str | None) -> None:
    """Write to stdout, or whole or not at all to a file.

    Raises:
        FtrunError
    """
    data = page(data)
    if output is None:
        from ftrun.view.text import for_encoding

        sys.stdout.write(for_encoding(data, sys.stdout.encoding))
        sys.stdout.flush()
        return
    from ftrun.core.system.files import replace

    try:
        replace(Path(output), data)
    except OSError as error:
        raise FtrunError(f"cannot write {output}: {error.strerror}") from None
