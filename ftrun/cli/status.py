"""`ftrun status`: what a run does now. Exit code 0 healthy, 1 starting, recovering or degraded, 3 not running, 4 no such run."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from ftrun.cli.main import app

EXIT_UNHEALTHY, EXIT_NOT_RUNNING, EXIT_NO_RUN = 1, 3, 4


@app.command(
    "status",
    help="Show what a run does now (default: the newest run).",
    epilog="Exit codes: 0 healthy, 1 starting, recovering or degraded, 3 not running, 4 no such run.\n\n"
    "Example: ftrun status brave-otter --json",
)
def status(
    run_id: str = typer.Argument(None, metavar="[RUN]", help="The run's name."),
    once: bool = typer.Option(True, "--once", help="One snapshot."),
    as_json: bool = typer.Option(False, "--json", help="JSON instead of text."),
) -> int:
    from ftrun.core.errors import FtrunError
    from ftrun.host.rundir import find_run
    from ftrun.view import snapshot

    run = find_run(run_id)
    if run is None:
        print(f"ftrun: error: no live run{'' if run_id is None else f' named {run_id}'}", file=sys.stderr)
        return EXIT_NO_RUN
    try:
        picture = snapshot.take(run)
    except (OSError, FtrunError):
        print(f"ftrun: error: run {run.run_id} starts or ends just now", file=sys.stderr)
        return EXIT_NOT_RUNNING
    if as_json:
        print(json.dumps(picture, indent=2))
    else:
        print("\n".join(_lines(picture)))
    if picture["state"] == snapshot.ENDED:
        return EXIT_NOT_RUNNING
    return 0 if picture["state"] == snapshot.HEALTHY else EXIT_UNHEALTHY


def _lines(picture: dict[str, Any]) -> list[str]:
    lines = [
        f"run {picture['run']}  {picture['state']}  {picture['machine']}  generation {picture['generation']}"
        f"  step {picture['gate']['last'] + 1}  up {picture['seconds']:.0f} s"
    ]
    for worker in picture["workers"]:
        who = f"spare {worker['cell']}" if worker["rank"] is None else f"rank {worker['rank']}"
        doing = f"step {worker['step']} {worker['phase']}" if worker["step"] is not None else worker["phase"]
        if worker["rank"] is None:
            doing = f"parked at {worker['parked_at']}" if "parked" in worker["flags"] else "warming up"
        if worker["collective"]:
            doing += f" in {worker['collective']}"
        if worker["exit"] is not None:
            doing = f"ended with {worker['exit']}"
        lines.append(f"{who:<9} pid {worker['pid']:<8} {doing}")
    return lines
