"""Describes the values of the script that a run keeps, for people; no decision reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ftrun.core.amounts import count, size
from ftrun.core.shared.notes import KeptNote


def in_words(kept: KeptNote) -> str:
    """Format the number of the values and the largest of them; `kept` must have some."""
    largest, number = max(kept.values, key=lambda copy: copy.bytes), number_of(kept)
    which = "" if number == 1 else f"the largest {'is' if len(largest.names) == 1 else 'are'} "
    return f"{count(number, 'value')} of the script's own, {which}{_joined(largest.names)} ({size(largest.bytes)})"


def number_of(kept: KeptNote) -> int:
    """Count the names of a note."""
    return sum(len(copy.names) for copy in kept.values)


def _joined(names: Sequence[str]) -> str:
    """Join the names of one copy in words."""
    *first, last = names or ("",)
    return f"{', '.join(first)} and {last}" if first else last


def listing(kept: KeptNote | None, not_kept: Mapping[str, str]) -> list[str]:
    """Return a line for each copy, the largest first, and one for each name that is not kept; [] if nothing is known."""
    lines: list[str] = []
    if kept is not None:
        what = f"{count(number_of(kept), 'value')} of the script's own" if kept.values else "no value of the script's own"
        lines.append(f"kept with each step: {what}, as of step {kept.step} on rank {kept.rank}")
        lines += _columns([(_joined(copy.names), size(copy.bytes)) for copy in sorted(kept.values, key=lambda copy: -copy.bytes)])
    if not_kept:
        lines += ["changed by the loop, and not kept:", *_columns(list(not_kept.items()))]
    return lines


def _columns(rows: list[tuple[str, str]]) -> list[str]:
    wide = max((len(name) for name, _ in rows), default=0)
    return [f"  {name.ljust(wide)}  {what}".rstrip() for name, what in rows]
