"""The options of a command in its help, group by group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ftrun.cli.options import GROUPS, OPTIONS, Option


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
