"""`ftrun status`: what a run does now.

Exit code 0 healthy or unprotected, 1 starting, recovering, stalled or degraded, 3 not running, 4 no such run.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import typer

from ftrun.cli.main import app
from ftrun.core.errors import EXIT_NOT_RUNNING, NoRunError, PlatformError
from ftrun.core.text import page

_UNHEALTHY = 1
_ROWS_PIPED = 64  # ranks described one by one when nobody scrolls; --json has all

EPILOG = (
    "Examples: `ftrun status` watches the newest run; `ftrun status brave-otter --json | jq .state`; "
    "`watch` is not needed. Keys: q leave, p pause, arrows and Enter for an incident, ? help. "
    "Exit code: 0 healthy or unprotected, 1 starting, recovering, stalled or degraded, 3 not running, 4 no such run."
)


@app.command("status", help="Show what a run does now, live on a terminal (default: the newest run).", epilog=EPILOG)
def status(
    run_id: str = typer.Argument(None, metavar="RUN", help="The run's name."),
    once: bool = typer.Option(False, "--once", help="One snapshot, also on a terminal."),
    interval: float = typer.Option(
        1.0, "--interval", metavar="S", min=0.1, help="Seconds between two looks, at least."
    ),
    as_json: bool = typer.Option(False, "--json", help="One snapshot as JSON."),
) -> int:
    from ftrun.core.runs import find_run
    from ftrun.view import snapshot

    run = find_run(run_id)
    if run is None:
        return _not_live(run_id, as_json)
    live = not (once or as_json) and sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM") != "dumb"
    try:
        if live:
            from ftrun.view.live import watch

            return exit_code(watch(run, interval))
        picture = snapshot.take(run, None if as_json else _ROWS_PIPED)
    except OSError:
        raise NoRunError(f"run {run.run_id} starts or ends just now", EXIT_NOT_RUNNING) from None
    _show(picture, as_json)
    return exit_code(picture["state"])


def exit_code(state: str) -> int:
    """The exit code that says how a run is."""
    from ftrun.view.state import ENDED, HEALTHY, UNPROTECTED

    if state == ENDED:
        return EXIT_NOT_RUNNING
    return 0 if state in (HEALTHY, UNPROTECTED) else _UNHEALTHY


def _show(picture: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(picture, indent=2))
        return
    from ftrun.view.paint import output_width, print_lines
    from ftrun.view.screen import screen

    print_lines(screen(picture, output_width()))


def _not_live(run_id: str | None, as_json: bool) -> int:
    from ftrun.view.find import require
    from ftrun.view.finished import ended_picture, ended_text

    if run_id is None:
        raise NoRunError("no live run; those that ended: ftrun runs --all")
    found = require(run_id)
    try:
        picture = ended_picture(found)
    except OSError as error:
        raise PlatformError(f"cannot read {found.journal}: {error.strerror}") from None
    print(json.dumps(picture, indent=2) if as_json else page(ended_text(picture)))
    return EXIT_NOT_RUNNING
