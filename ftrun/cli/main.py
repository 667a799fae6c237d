"""Entry point `ftrun`: picks the command, turns every expected error into one sentence on stderr and an exit code.

`ftrun train.py ...` is `ftrun run train.py ...`; a script that is called like a command is named with its folder
(`ftrun ./status`).
"""

from __future__ import annotations

import errno
import importlib
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from ftrun.cli.catalog import COMMANDS
from ftrun.cli.help import front_page, write_commands, write_options
from ftrun.cli.options import EPILOG, Option
from ftrun.core.codes import read_on
from ftrun.core.errors import (
    EXIT_FAILED,
    EXIT_SIGNAL,
    EXIT_USAGE,
    FtrunError,
    UsageError,
)
from ftrun.core.text import tell

WIDTH = 110  # columns of the help at most


class _Root(TyperGroup):
    """Shows one page, and with --help-all the options of the default command too, where users of torchrun look for them."""

    everything = False

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS] train.py [ARGS]... | COMMAND"]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if self.everything:
            super().format_help(ctx, formatter)
        else:
            formatter.write(front_page())

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        write_commands(formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        write_options(formatter)


app = typer.Typer(
    name="ftrun",
    cls=_Root,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
    help="Run PyTorch training like torchrun, and repair it in place when a worker fails. "
    "`ftrun [OPTIONS] train.py` is short for `ftrun run [OPTIONS] train.py`; everything after the script belongs to it.",
    epilog=EPILOG,
)

# the base of what the parser raises; typer's releases differ in where it lives
_ParserError: type[Exception] = next(k for k in typer.BadParameter.__mro__ if k.__name__ == "ClickException")

def show_version(wanted: bool = True) -> None:
    """Print the version and leave, if that is `wanted`."""
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"ftrun {version('ftrun')}")
        except PackageNotFoundError:
            typer.echo("ftrun (not installed)")
        raise typer.Exit


def _show_everything(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.command.everything = True  # type: ignore[attr-defined]
        typer.echo(ctx.get_help())
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=show_version, is_eager=True, help="Show the version and exit."
    ),
    help_all: bool = typer.Option(
        False, "--help-all", callback=_show_everything, is_eager=True, help="Show every option of a run, too, and exit."
    ),
) -> None:
    pass


def given_options(options: Iterable[Option], given: Mapping[str, str | bool | None]) -> dict[str, str]:
    """The options on the command line, by their names; a flag is "1"."""
    return {
        option.name: "1" if option.is_flag else str(given[option.key])
        for option in options
        if given[option.key] not in (None, False)
    }


def signature(options: Iterable[Option], **at_once: Callable[[Any], None]) -> inspect.Signature:
    """The signature, for typer, of a command that takes a script with its arguments, and `options` from a table.

    `at_once`: what an option calls as soon as it is read, by the option's key.
    """
    keyword = inspect.Parameter.KEYWORD_ONLY
    script = typer.Argument(..., metavar="SCRIPT")
    rest = typer.Argument(None, metavar="[ARGS]...")
    found = [
        inspect.Parameter("script", keyword, default=script, annotation=str),
        inspect.Parameter("args", keyword, default=rest, annotation=list[str] | None),
    ]
    for option in options:
        kind: Any = bool if option.is_flag else str | None
        names = (*filter(None, (option.short,)), *option.spellings)
        call = at_once.get(option.key)
        default = typer.Option(
            False if option.is_flag else None,
            *names, metavar=option.metavar or None, callback=call, is_eager=call is not None,
        )  # fmt: skip
        found.append(inspect.Parameter(option.key, keyword, default=default, annotation=kind))
    return inspect.Signature(found)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    _open_what_is_closed()
    code = execute(sys.argv[1:] if argv is None else list(argv))
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _unwritten(error)
    sys.exit(code)


def _open_what_is_closed() -> None:
    """Open /dev/null for each closed stream (`>&-`): a file of ours with its number would take what workers print."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def load_commands() -> None:
    """Have every command on `app`."""
    for listed in COMMANDS.values():
        importlib.import_module(f"ftrun.cli.commands.{listed.module}")


_OF_THE_ROOT = ("-h", "--help", "--help-all", "--version")


def execute(argv: list[str]) -> int:
    """Run one command line; gives the exit code."""
    if not argv:
        execute(["--help"])
        return EXIT_USAGE
    if argv[0] not in _OF_THE_ROOT:
        argv = argv if argv[0] in COMMANDS else ["run", *argv]
        importlib.import_module(f"ftrun.cli.commands.{COMMANDS[argv[0]].module}")
    group = typer.main.get_command(app)
    try:
        with group.make_context("ftrun", list(argv)) as context:  # its own main() would exit by itself on a closed pipe
            result = group.invoke(context)
        return result if isinstance(result, int) else 0
    except typer.Exit as end:
        return end.exit_code
    except _ParserError as error:
        sentence = _sentence(error, argv)
        return _fail(sentence + read_on("F105" if sentence == _NO_SCRIPT else _COMMAND_LINE), getattr(error, "exit_code", EXIT_USAGE))
    except FtrunError as error:
        code = error.explain or (_COMMAND_LINE if isinstance(error, UsageError) else "")
        return _fail(f"{error}{read_on(code)}", error.code)
    except (typer.Abort, KeyboardInterrupt, EOFError):
        return EXIT_SIGNAL + 2
    except BrokenPipeError:
        return EXIT_SIGNAL + signal.SIGPIPE
    except OSError as error:
        # a full disk behind stdout; every file of ours has a name, and a run has memory of its own to fill
        if error.errno not in _FULL or error.filename is not None or argv[0] == "run":
            raise
        return _unwritten(error)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def _unwritten(error: OSError) -> int:
    """stdout carries data: what did not get there is a failure. What is left of it has nowhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if isinstance(error, BrokenPipeError):
        return EXIT_SIGNAL + signal.SIGPIPE
    return _fail(f"cannot write to stdout: {error.strerror}", EXIT_FAILED)


def _fail(message: str, code: int) -> int:
    tell(f"error: {message}")
    return code


_COMMAND_LINE = "F101"
_NO_SCRIPT = "there is no script: say which, as in ftrun --nproc-per-node 4 train.py; see: ftrun --help"


def _value_of(param: Any, argv: Sequence[str]) -> str:
    """The value of an option on the command line."""
    words = iter(argv)
    given = ""
    for word in words:
        option, found, value = word.partition("=")
        if option in param.opts:
            given = value if found else next(words, "")
    return given


def _sentence(error: Any, argv: Sequence[str]) -> str:
    """Put an error of the parser into our words: what is wrong, and what would have been right."""
    command = argv[0]
    said = " ".join(getattr(error, "format_message", error.__str__)().split())
    help_ = f"see: ftrun {command} --help" if command in COMMANDS else "see: ftrun --help"
    param = getattr(error, "param", None)
    name = "" if param is None else next((o for o in param.opts if o.startswith("--")), (param.metavar or param.name).upper())
    match type(error).__name__:
        case "MissingParameter" if name == "SCRIPT":
            return _NO_SCRIPT
        case "MissingParameter" if param is not None:
            return f"ftrun {command} needs {name} {param.metavar if name.startswith('--') else ''}".rstrip() + f"; {help_}"
        case "BadParameter" if param is not None:
            reason = said.partition(": ")[2].rstrip(".")
            for kind, wanted in (("float|number", "a number"), ("int|integer", "a whole number")):
                if re.search(f"a valid ({kind})\\b", reason):  # typer's releases differ in the words
                    return f"{name} must be {wanted}, not {_value_of(param, argv)!r}"
            return f"{name}: {reason}"
        case "NoSuchOption":
            return f"ftrun {command} has no option {error.option_name}; {help_}"
        case _ if said.startswith("Got unexpected extra argument"):
            return f"ftrun {command}: {said[said.rfind('(') + 1 : -1]} is too much; {help_}"
        case _:
            return f"{said.rstrip('.')}; {help_}"
