"""Collects the names of values that the loop changes and the workers do not keep, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ftrun.core.shared import notes

_SHOWN = 6  # names in one line


def reasons(run_dir: Path) -> dict[str, str]:
    """Return the reasons in all workers' notes, by name; "" = no worker knows the reason."""
    found: dict[str, str] = {}
    for note in notes.read_all(notes.LeftOutNote, run_dir):
        for name, why in note.names.items():
            found[name] = found.get(name) or why
    return dict(sorted(found.items()))


def shown(left_out: list[str], why: Mapping[str, str] | None = None) -> str:
    """Format the names in one line, with their known reasons."""
    more = len(left_out) - _SHOWN
    said = [f"{name} ({why[name]})" if why and why.get(name) else name for name in left_out[:_SHOWN]]
    return ", ".join(said) + (f" and {more} more" if more > 0 else "")
