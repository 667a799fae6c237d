"""`ftrun metrics`: the figures of a live run in Prometheus' format: once, or into a file or over HTTP until it ends."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import typer

from ftrun.cli.main import app
from ftrun.core.text import tell

EPILOG = (
    "Examples: `ftrun metrics | grep incidents`; `ftrun metrics brave-otter --file /var/lib/node_exporter/ftrun.prom`; "
    "`ftrun metrics --port 9400`, then curl http://127.0.0.1:9400/metrics. A run does the same by itself with --metrics-file and "
    "--metrics-port. Exit code: 0, 2 usage, 4 no such run."
)


@app.command("metrics", help="Print the figures of a live run for Prometheus (default: the newest run).", epilog=EPILOG)
def metrics(
    run_id: str = typer.Argument(None, metavar="RUN", help="The run's name."),
    file: str = typer.Option(None, "--file", metavar="FILE", help="Write them to a file until the run ends."),
    port: int = typer.Option(
        None, "--port", metavar="PORT", min=0, max=65535, help="Serve them on 127.0.0.1 until then."
    ),
    interval: float = typer.Option(
        5.0, "--interval", metavar="S", min=0.1, help="Seconds between two writings of the file."
    ),
    as_json: bool = typer.Option(False, "--json", help="One look as JSON: a list of name, labels and value."),
) -> int:
    from ftrun.core.errors import FtrunError, UsageError
    from ftrun.core.runs import live_run
    from ftrun.host.services.metrics_exporter import address, bound, require_writable
    from ftrun.view.exporter import Exporter, keep, serve

    if as_json and (file or port is not None):
        raise UsageError("--json is for one look, without --file and --port")
    run = live_run(run_id)
    if file:
        require_writable(Path(file), "--file")
    listener = None if port is None else bound(port, "--port")
    try:
        exporter = Exporter(run)
    except OSError:
        raise FtrunError(f"run {run.run_id} starts or ends just now", explain="F103") from None
    with contextlib.closing(exporter):
        if listener is None and not file:
            shown = exporter.look()
            sys.stdout.write(json.dumps(_samples(shown), indent=2) + "\n" if as_json else shown)
            return 0
        if listener is not None:
            serve(exporter, listener)
            tell(f"metrics at {address(listener)}")
        keep(exporter, run, Path(file) if file else None, interval, None)
    return 0


def _samples(shown: str) -> list[dict[str, object]]:
    from ftrun.view.metrics import parsed

    return [{"name": name, "labels": labels, "value": value} for name, labels, value in parsed(shown)]
