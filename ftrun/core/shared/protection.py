"""Judges whether a run is protected, so that ftrun can replace a dead rank in place. The launcher records the answer in the journal."""

from __future__ import annotations

from collections.abc import Sequence

from ftrun.core.shared.board import Cell, Flag

PROTECTED, UNPROTECTED = "protected", "unprotected"


def protection(ranks: Sequence[Cell]) -> str | None:
    """Return PROTECTED, UNPROTECTED, or None while it is not known. `ranks`: the cells of the world's workers."""
    if ranks and all(cell.has(Flag.PROTECTED) for cell in ranks):
        return PROTECTED
    # an optimizer took a step before any ftrun loop began: the script trains without ftrun
    unguarded = any(cell.has(Flag.STEPPED) and not cell.has(Flag.PROTECTED) for cell in ranks)
    return UNPROTECTED if unguarded and not any(cell.has(Flag.PROTECTED) for cell in ranks) else None
