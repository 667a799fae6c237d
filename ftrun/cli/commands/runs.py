"""`ftrun runs` and `ftrun stop`: which runs of this user live, and ending one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ftrun.cli.main import app
from ftrun.core.errors import UsageError
from ftrun.core.text import printable, tell

if TYPE_CHECKING:
    from ftrun.core.ended import EndedRun

_BEYOND = 15.0  # seconds that a run may need beyond the time that its workers get


@app.command(
    "runs",
    help="List the live runs of this user, with --all also those that ended and left their logs.",
    epilog="Examples: ftrun runs --all; ftrun runs --json | jq -r '.[].run'",
)
def runs(
    everything: bool = typer.Option(False, "--all", "-a", help="Those that ended, too, the newest first."),
    as_json: bool = typer.Option(False, "--json", help="JSON instead of text."),
) -> int:
    from ftrun.core.amounts import duration
    from ftrun.core.ended import ended_runs
    from ftrun.core.runs import list_runs

    found, ended = list_runs(), ended_runs() if everything else []
    if as_json:
        rows = [{"run": r.run_id, "pid": r.pid, "path": str(r.path), **_shown(r.raw)} for r in found]
        rows += [_row(run) for run in ended]
        print(json.dumps(rows, indent=2))
        return 0
    for run in found:
        age = time.time() - run.started
        script = " ".join(run.raw.get("argv", ()))
        print(
            printable(f"{run.run_id}  pid {run.pid}  {run.raw.get('world_size', '?')} workers  {age:.0f} s  {script}")
        )
    for past in ended:
        how = "was cut off" if past.code is None else f"exit code {past.code}"
        print(printable(f"{past.name}  {how}  {duration(time.time() - past.ended)} ago  {' '.join(past.argv)}  {past.logs}"))
    if not found and not ended:
        tell("no run" if everything else "no live run; those that ended: ftrun runs --all")
    return 0


def _row(run: EndedRun) -> dict[str, object]:
    return {
        "run": run.name,
        "pid": None,
        "exit_code": run.code,
        "started": run.began,
        "ended": run.ended,
        "argv": list(run.argv),
        "cwd": run.cwd,
        "logs": str(run.logs),
    }


@app.command(
    "stop",
    help="End a run as SIGTERM does, and wait for its end.",
    epilog="Without RUN: the live run, if there is only one and it was started in this folder. "
    "Exit codes: 0 it ended, 1 it still ends, 2 usage, 4 no such run.\n\nExample: ftrun stop brave-otter --wait 60",
)
def stop(
    run_id: str = typer.Argument(None, metavar="RUN", help="The run's name."),
    wait: float = typer.Option(
        None, "--wait", metavar="S", help="Seconds to wait for its end (default: its shutdown timeout and 15 more)."
    ),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask; needed without a terminal."),
) -> int:
    from ftrun.cli import live
    from ftrun.core.waiting import wait_for

    if wait is not None and not 0 <= wait < float("inf"):
        raise UsageError("--wait is a number of seconds, 0 or more")
    run = live.chosen(run_id, "stop RUN")
    typed = run_id is not None and sys.stdin.isatty()  # whoever types a run's name means it
    if not live.confirmed(f"end run {live.described(run)}?", yes or typed):
        tell("nothing was ended")
        return 1
    tell(f"ending run {run.run_id}")
    with contextlib.suppress(ProcessLookupError):  # it ends just now
        os.kill(run.pid, signal.SIGTERM)
    seconds = float(run.raw.get("shutdown_timeout", 30.0)) + _BEYOND if wait is None else wait
    if not wait_for(lambda: not run.alive() and not _is_there(run.path, run.raw["start"]), seconds, 0.02):
        tell(
            f"error: run {run.run_id} (process {run.pid}) still ends after {seconds:g} s; "
            f"to kill its workers at once: ftrun stop {run.run_id} --yes"
        )
        return 1
    tell(f"run {run.run_id} ended")
    return 0


def _is_there(path: Path, start: int) -> bool:
    """Is the run directory still that run's? Another one may have taken the name since."""
    from ftrun.core.runs import read_run

    run = read_run(path)
    return run is not None and run.raw["start"] == start


def _shown(raw: dict[str, object]) -> dict[str, object]:
    return {key: raw[key] for key in ("started", "argv", "world_size", "spares", "log_dir", "cwd") if key in raw}
