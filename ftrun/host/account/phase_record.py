"""Gathers the phases of the ranks' last steps around an incident, while the board still has them.

The reporter looks twice, because the rows of a rank are a small ring: when the gate is about to open again, while every rank
still waits, and once the first new step is done. This file decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ftrun.core.account import Victim
from ftrun.core.shared.board import Board
from ftrun.core.shared.steps import Row, rows

RANKS_MOST = 64  # ranks whose phases are kept: a person reads a few, and the journal has the stages of all


class PhaseRecord:
    """The rows of one incident, by rank and by incarnation."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], dict[tuple[int, int, int], Row]] = {}

    def look(self, board: Board, holders: Mapping[int, int], victims: Sequence[Victim]) -> None:
        """Take what the board shows now; a later look at the same attempt wins."""
        wanted = [(v.rank, v.cell) for v in victims]
        wanted += sorted(holders.items())
        for rank, index in dict.fromkeys(wanted[:RANKS_MOST]):
            kept = self._rows.setdefault((rank, index), {})
            for row in rows(board.cell(index)):
                kept[(row.step, row.generation, row.attempt)] = row

    def facts(self, began: int) -> list[dict[str, Any]]:
        """Return one entry per rank and incarnation.

        Each row of `steps` is step, generation, attempt and the ms (from `began`, ns) at which the rank entered forward, backward,
        gate, update and left the body; None where it never did.
        """
        return [
            {"rank": rank, "cell": cell, "steps": [_plain(kept[key], began) for key in sorted(kept)]}
            for (rank, cell), kept in self._rows.items()
        ]


def _plain(row: Row, began: int) -> list[Any]:
    times = (row.forward, row.backward, row.gate, row.update, row.done)
    return [row.step, row.generation, row.attempt, *(round((t - began) / 1e6, 3) if t else None for t in times)]
