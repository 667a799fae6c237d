"""Reads what the ranks of an incident moved, and when, from the notes that they left. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftrun.core.shared import notes
from ftrun.core.shared.notes import MovesNote

RANKS_MOST = 16  # ranks whose transfers are kept: a person reads a few


def gather(run_dir: Path, holders: Mapping[int, int], generation: int, began: int) -> list[dict[str, Any]]:
    """Return one entry for each rank that moved something in `generation`.

    Each of `moves` is its stage, the rank that the bytes came from, and the ms (from `began`, ns) at which it began and ended.
    Removes these notes and those of earlier repairs that nobody read: another failure cut the repair short, or they came late.
    """
    found: list[dict[str, Any]] = []
    for rank, cell in sorted(holders.items()):
        note = notes.read(MovesNote, run_dir, cell, generation)
        if note is not None and note.moves and len(found) < RANKS_MOST:
            rows = [[m.stage, m.source, _ms(m.begin - began), _ms(m.end - began)] for m in note.moves]
            found.append({"rank": rank, "cell": cell, "moves": rows})
    for key in notes.keys(MovesNote, run_dir):
        if key[1] <= generation:
            notes.remove(MovesNote, run_dir, *key)
    return found


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 3)
