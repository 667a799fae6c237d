"""The help: the front page of `ftrun --help`, and the options of a command, group by group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ftrun.cli.catalog import COMMANDS, COMMON, SECTIONS
from ftrun.cli.options import GROUPS, OPTIONS, Option

_FRONT = """\
Usage: ftrun [OPTIONS] train.py [ARGS]...
       ftrun COMMAND [OPTIONS]

  Run PyTorch training like torchrun, and repair it in place when a worker
  fails. Everything after the script belongs to the script.

Commands:
{commands}

Options:
{common}
  -h, --help            Show this page; ftrun COMMAND --help says more.
  --help-all            Show every option of a run, too.
  --version             Show the version and exit.

  Exit codes: 0 done, 1 a worker failed for good, 2 usage, 69 this machine
  lacks something, 70 a repair stood still, 75 requeue me, 78 bad plan or
  configuration.

Example: ftrun --nproc-per-node 4 --spares 1 train.py --epochs 3
"""


def front_page() -> str:
    """The page of `ftrun --help`: at most 40 lines of 80 columns."""
    rows = []
    for section in SECTIONS:
        label = section
        for name, listed in COMMANDS.items():
            if listed.section == section:
                rows.append(f"  {label:<8}{name:<14}{listed.summary}")
                label = ""
    common = "\n".join(f"  {option:<22}{text}" for option, text in COMMON)
    return _FRONT.format(commands="\n".join(rows), common=common)


def write_commands(formatter: Any) -> None:
    """Every command with its whole summary."""
    with formatter.section("Commands"):
        formatter.write_dl([(name, listed.summary) for name, listed in COMMANDS.items()])


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
