"""What the workers of a run found changed by the loop and not kept: names, in files of the run directory."""

from __future__ import annotations

import json
from pathlib import Path

_SHOWN = 6  # names in one line


def file_name(cell: int) -> str:
    return f"{cell}-left-out"


def names(run_dir: Path) -> list[str]:
    """Of all workers; a file that cannot be read says nothing."""
    return sorted({name for found in by_cell(run_dir).values() for name in found})


def by_cell(run_dir: Path, since: int = 0) -> dict[int, list[str]]:
    """What the workers from cell `since` on found, each; a file that cannot be read says nothing."""
    found: dict[int, list[str]] = {}
    for path in sorted((run_dir / "errors").glob("*-left-out.json")):
        try:
            cell, facts = int(path.name.partition("-")[0]), json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        listed = facts.get("names") if isinstance(facts, dict) else None
        if cell >= since and isinstance(listed, list):
            found[cell] = [str(name) for name in listed]
    return found


def shown(left_out: list[str]) -> str:
    """The names in one line."""
    more = len(left_out) - _SHOWN
    return ", ".join(left_out[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
