"""`ftrun events`: the journal as lines, of a live run as it grows. Exit code 0, 4 no such run."""

from __future__ import annotations

import sys

import typer

from ftrun.cli.main import app
from ftrun.core.text import printable

EPILOG = (
    "Examples: `ftrun events` lists what happened in the newest run; `ftrun events brave-otter --follow` goes on until the run "
    "ends; `ftrun events --json | jq 'select(.note == \"incident\")'`. The fields are described in ftrun/view/SCHEMA.md. "
    "Exit code: 0, 4 no such run."
)


@app.command("events", help="List what happened in a run, from its journal (default: the newest run).", epilog=EPILOG)
def events(
    run_id: str = typer.Argument(None, metavar="RUN", help="The run's name, or the folder of its logs."),
    follow: bool = typer.Option(False, "-f", "--follow", help="Go on until the run ends."),
    as_json: bool = typer.Option(False, "--json", help="The journal's own lines (JSON, one a line)."),
) -> int:
    from ftrun.core.errors import PlatformError
    from ftrun.view.events import stream
    from ftrun.view.find import require
    from ftrun.view.text import for_encoding

    found = require(run_id)
    lines = stream(found, follow, as_json)
    while True:
        try:
            line = next(lines, None)
        except OSError as error:
            raise PlatformError(f"cannot read {found.journal}: {error.strerror}") from None
        if line is None:
            return 0
        print(for_encoding(printable(line), sys.stdout.encoding), flush=follow)
