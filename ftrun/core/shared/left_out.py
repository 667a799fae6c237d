"""What the workers of a run found changed by the loop and not kept: names, in files of the run directory, and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ftrun.core.shape import mapped, record, text
from ftrun.core.system import files

_SHOWN = 6  # names in one line
_TOLD = record({"names": mapped(text)})


def file_name(cell: int) -> str:
    return f"{cell}-left-out"


def by_cell(run_dir: Path, since: int = 0) -> dict[int, dict[str, str]]:
    """What the workers from cell `since` on found, each: names, and why; "": nobody knows. A file that cannot be read says nothing."""
    found = {}
    for path in sorted((run_dir / "errors").glob("*-left-out.json")):
        cell, told = path.name.partition("-")[0], files.read_json(path)
        if cell.isdecimal() and int(cell) >= since and _TOLD(told):
            found[int(cell)] = told["names"]
    return found


def reasons(run_dir: Path) -> dict[str, str]:
    """Of all workers, by name."""
    found: dict[str, str] = {}
    for told in by_cell(run_dir).values():
        for name, why in told.items():
            found[name] = found.get(name) or why
    return dict(sorted(found.items()))


def names(run_dir: Path) -> list[str]:
    """Of all workers."""
    return [*reasons(run_dir)]


def shown(left_out: list[str], why: Mapping[str, str] | None = None) -> str:
    """The names in one line, with the reasons that are given."""
    more = len(left_out) - _SHOWN
    said = [f"{name} ({why[name]})" if why and why.get(name) else name for name in left_out[:_SHOWN]]
    return ", ".join(said) + (f" and {more} more" if more > 0 else "")
