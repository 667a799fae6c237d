"""`ftrun run`, the default command: made from the table of options; checks what was asked, then hands over to the launcher."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand

from ftrun.cli.main import WIDTH, app, show_version
from ftrun.cli.options import GROUPS, OPTIONS, RUN_EPILOG, Option
from ftrun.core.errors import UsageError


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


def write_options(formatter: Any) -> None:
    """The options of a run, group by group."""
    for group in GROUPS:
        write_group(formatter, group, OPTIONS)


def write_group(formatter: Any, group: str, options: Iterable[Option]) -> None:
    """The options of one group, if there are any."""
    rows = [_help_row(option) for option in options if option.group == group]
    if rows:
        with formatter.section(group):
            formatter.write_dl(rows)


def _help_row(option: Option) -> tuple[str, str]:
    names = ", ".join(filter(None, (option.short, f"--{option.name}")))
    text = f"{names} {option.metavar}".rstrip()
    return text, f"{option.help} [default: {option.default}]" if option.default and option.metavar else option.help


def run(script: str, args: list[str] | None, **given: str | bool | None) -> int:
    """`given` holds what was said on the command line, None or False for the rest."""
    from ftrun.cli import dryrun, resolve
    from ftrun.cli.config import read
    from ftrun.host.launcher import launch, require_usable

    said = {
        option.name: "1" if option.is_flag else str(given[option.key])
        for option in OPTIONS
        if given[option.key] not in (None, False)
    }
    config = read(said.get("config") or os.environ.get("FTRUN_CONFIG") or None)
    values = resolve.Values(said, os.environ, config)
    if values["json"] and not values["dry-run"]:
        raise UsageError("--json goes with --dry-run")
    try:
        settings = resolve.settings(values, script, tuple(args or ()), config)
    except UsageError as error:
        raise UsageError(f"{error}{_command_meant(script)}") from None
    require_usable()
    if values["dry-run"]:
        show = dryrun.as_json if values["json"] else dryrun.as_text
        print(show(values, settings))
        return 0
    sys.stdout.flush()
    return launch(settings)


def _command_meant(script: str) -> str:
    """A hint for `ftrun statsu`."""
    if not script.isalpha() or os.path.exists(script):
        return ""
    from ftrun.cli.spelling import nearest

    close = nearest(script, [command.name or "" for command in app.registered_commands])
    return f"; did you mean the command: ftrun {close}?" if close else ""


def _parameters() -> Iterator[inspect.Parameter]:
    """The signature that typer reads: script, args, and every option of the table."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    argument = typer.Argument(..., metavar="SCRIPT")
    rest = typer.Argument(None, metavar="[ARGS]...")
    yield inspect.Parameter("script", keyword, default=argument, annotation=str)
    yield inspect.Parameter("args", keyword, default=rest, annotation=list[str] | None)
    for option in OPTIONS:
        kind: Any = bool if option.is_flag else str | None
        names = (*filter(None, (option.short,)), *option.spellings)
        if option.name == "version":
            default = typer.Option(False, *names, callback=show_version, is_eager=True)
        else:
            default = typer.Option(False if option.is_flag else None, *names, metavar=option.metavar or None)
        yield inspect.Parameter(option.key, keyword, default=default, annotation=kind)


run.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
run.__annotations__ = {}
app.command(
    "run",
    cls=RunCommand,
    context_settings={"allow_interspersed_args": False, "max_content_width": WIDTH},
    help="Run a training script with one worker per GPU or CPU slot. Everything after the script belongs to the script.",
    epilog=RUN_EPILOG,
)(run)
