"""Why a result may not be called exact, and where that was seen: what workers leave in files of the run directory, beside F.INEXACT."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftrun.core.shared.board import Inexact
from ftrun.core.shared.moment import Moment


@dataclass(frozen=True)
class Doubt:
    """One reason, as the worker of one board cell saw it first. `names`: what it is about, where that has names."""

    why: Inexact
    cell: int
    moment: Moment
    names: tuple[str, ...] = ()


def file_name(cell: int) -> str:
    return f"{cell}-inexact"


def facts(moment: Moment, names: Iterable[str]) -> dict[str, Any]:
    """What the file of a worker says of one reason."""
    return {"moment": vars(moment), "names": sorted(names)}


def read(run_dir: Path, since: int = 0) -> list[Doubt]:
    """Of all workers from cell `since` on; a file that cannot be read says nothing."""
    found: list[Doubt] = []
    for path in sorted((run_dir / "errors").glob("*-inexact.json")):
        try:
            cell = int(path.name.partition("-")[0])
            told = json.loads(path.read_text())
            found += [_doubt(name, cell, one) for name, one in told.items() if cell >= since]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def _doubt(name: str, cell: int, told: Mapping[str, Any]) -> Doubt:
    return Doubt(Inexact[name], cell, Moment.told(told["moment"]), tuple(map(str, told["names"])))


def earliest(doubts: Iterable[Doubt]) -> Doubt | None:
    """The one that was seen first, of those that say where."""
    placed = [doubt for doubt in doubts if doubt.moment.step is not None]
    return min(placed, key=lambda doubt: (doubt.moment.epoch or 0, doubt.moment.step), default=None)
