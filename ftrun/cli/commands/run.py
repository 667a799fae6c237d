"""`ftrun run`, the default command: made from the table of options; checks what was asked, then hands over to the launcher."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperCommand

from ftrun.cli.catalog import COMMANDS
from ftrun.cli.help import write_options
from ftrun.cli.main import WIDTH, app, given_options, show_version, signature
from ftrun.cli.options import OPTIONS, RUN_EPILOG
from ftrun.core.errors import UsageError
from ftrun.core.text import page


class RunCommand(TyperCommand):
    """Reads abbreviations as argparse does and shows the options in groups."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from ftrun.cli.spelling import spelled_out

        return super().parse_args(ctx, spelled_out(args))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", "SCRIPT", "[ARGS]..."]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Arguments"):
            formatter.write_dl([("SCRIPT", "The training script, a module with -m, a program with --no-python.")])
        write_options(formatter)


def print_completion(shell: str | None) -> None:
    """Print the completion file of `shell` and leave, if one is named.

    Raises:
        UsageError
    """
    if shell is not None:
        from ftrun.cli.completion import printed

        printed(shell)
        raise typer.Exit


def run(script: str, args: list[str] | None, **given: str | bool | None) -> int:
    """`given`: the options on the command line, None or False for the rest."""
    from ftrun.cli import dryrun, resolve
    from ftrun.cli.config import read
    from ftrun.host.run.launcher import launch, require_usable

    said = given_options(OPTIONS, given)
    config = read(said.get("config") or os.environ.get("FTRUN_CONFIG") or None)
    values = resolve.Values(said, os.environ, config)
    if values["json"] and not values["dry-run"]:
        raise UsageError("--json goes with --dry-run")
    try:
        settings = resolve.settings(values, script, tuple(args or ()), config)
    except UsageError as error:
        hint = "" if values["module"] or values["no-python"] else _meant(script)
        raise UsageError(f"{error}{hint}", explain=error.explain) from None
    require_usable()
    if values["dry-run"]:
        show = dryrun.as_json if values["json"] else dryrun.as_text
        print(page(show(values, settings)))
        return 0
    sys.stdout.flush()
    return launch(settings)


def _meant(script: str) -> str:
    """A hint for `ftrun statsu` and `ftrun trian.py`."""
    if os.path.exists(script):
        return ""
    from ftrun.cli.spelling import nearest

    if os.sep not in script and "." not in script:
        close = nearest(script, COMMANDS)
        return f"; did you mean the command: ftrun {close}?" if close else ""
    folder, name = os.path.split(script)
    beside = os.listdir(folder or os.curdir) if os.path.isdir(folder or os.curdir) else ()
    close = nearest(name, (entry for entry in beside if entry.endswith(".py")), 0.8)
    return f"; did you mean {os.path.join(folder, close)}?" if close else ""


run.__signature__ = signature(OPTIONS, version=show_version, print_completion=print_completion)  # type: ignore[attr-defined]
run.__annotations__ = {}
app.command(
    "run",
    cls=RunCommand,
    context_settings={"allow_interspersed_args": False, "max_content_width": WIDTH},
    help="Run a training script with one worker per GPU or CPU slot. Everything after the script belongs to the script.",
    epilog=RUN_EPILOG,
)(run)
