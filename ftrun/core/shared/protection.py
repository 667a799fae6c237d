"""Is a run protected, so that a rank that dies is replaced in place? The launcher judges, and notes it in the journal."""

from __future__ import annotations

from collections.abc import Sequence

from ftrun.core.shared.board import Cell, Flag

PROTECTED, UNPROTECTED = "protected", "unprotected"


def protection(ranks: Sequence[Cell]) -> str | None:
    """PROTECTED, UNPROTECTED, or None: not known yet. `ranks`: the cells of the world's workers."""
    if ranks and all(cell.has(Flag.PROTECTED) for cell in ranks):
        return PROTECTED
    # an optimizer that takes a step before any loop of ours began: the script trains without us
    unguarded = any(cell.has(Flag.STEPPED) and not cell.has(Flag.PROTECTED) for cell in ranks)
    return UNPROTECTED if unguarded and not any(cell.has(Flag.PROTECTED) for cell in ranks) else None
