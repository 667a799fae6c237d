"""What the ranks of an incident moved, and when: read from the files that they left. Never decides anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftrun.core.shared.moves import PREFIX, Move, file_name, generation_of
from ftrun.core.system import files

RANKS_MOST = 16  # ranks whose transfers are kept: a person looks at some


def gather(run_dir: Path, holders: Mapping[int, int], generation: int, began: int) -> list[dict[str, Any]]:
    """One entry for each rank that moved something in `generation`; each of `moves` is its stage, the rank that the bytes
    came from, and the ms (from `began`, ns) at which it began and ended. The files are taken away, and those of repairs before
    that nobody asked for: of one that another failure cut short, or that came after it was over."""
    folder = run_dir / "errors"
    for path in folder.glob(f"{PREFIX}*.json"):
        if generation_of(path.stem) < generation:
            path.unlink(missing_ok=True)
    found: list[dict[str, Any]] = []
    for rank, cell in sorted(holders.items()):
        path = folder / f"{file_name(cell, generation)}.json"
        done = [Move(*row) for row in files.read_json(path).get("moves", ())]
        if not done:
            continue
        path.unlink()
        if len(found) < RANKS_MOST:
            rows = [[m.stage, m.source, _ms(m.begin - began), _ms(m.end - began)] for m in done]
            found.append({"rank": rank, "cell": cell, "moves": rows})
    return found


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 3)
