"""Model how the bytes of a state moved in one incident (figure 004). Pure: no drawing, no clock, no files.

Times are ms after the fault. Every bar was measured: a worker notes the times of each stage of each chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftrun.core.shared import notes
from ftrun.view.timeline.axis import Scale

# kinds of bars, named as in the figure
H2D, SRC, DST, RELOAD = "H2D", "Broadcast (src)", "Broadcast (dst)", "Reload weights"
KINDS = {notes.H2D: H2D, notes.BROADCAST_SRC: SRC, notes.BROADCAST_DST: DST, notes.RELOAD: RELOAD}
RANKS_MOST = 8  # ranks that are drawn
_SENDING = (H2D, SRC)


@dataclass(frozen=True)
class TransferPiece:
    """One chunk in one stage. `source`: the rank that the bytes came from."""

    kind: str
    source: int
    begin: float
    end: float


@dataclass(frozen=True)
class TransferRow:
    """The pieces of one thread of a rank: it `sends` (from the host into its buffers), or takes bytes into its weights."""

    rank: int
    sends: bool
    pieces: tuple[TransferPiece, ...]


@dataclass(frozen=True)
class Transfer:
    """All pieces of one transfer. `ranks`: the number of ranks in it, of which only the first have rows."""

    rows: tuple[TransferRow, ...]
    ranks: int
    begin: float
    end: float

    def idle(self) -> list[tuple[float, float]]:
        """Return the intervals without a move that exceed a quarter of the total time of the moves."""
        gaps, until, busy = [], self.begin, 0.0
        for piece in sorted((p for row in self.rows for p in row.pieces), key=lambda p: p.begin):
            if piece.begin > until:
                gaps.append((until, piece.begin))
            busy += max(0.0, piece.end - max(until, piece.begin))
            until = max(until, piece.end)
        return [(begin, end) for begin, end in gaps if end - begin > 0.25 * busy]

    def scale(self, width: float, gap: float) -> Scale:
        """Return the scale of an axis `width` wide, which cuts each idle interval to at most `gap`."""
        idle = self.idle()
        gap = min(gap, width / (4 * len(idle))) if idle else 0.0
        busy = max(self.end - self.begin - sum(end - begin for begin, end in idle), 1e-9)
        per_ms = (width - gap * len(idle)) / busy
        times, places = [self.begin], [0.0]
        for begin, end in idle:
            places += [places[-1] + (begin - times[-1]) * per_ms]
            times += [begin, end]
            places += [places[-1] + gap]
        return Scale((*times, max(self.end, times[-1])), (*places, places[-1] + (self.end - times[-1]) * per_ms))

    def buffers(self) -> list[tuple[str, list[tuple[int, TransferPiece]]]]:
        """Return the figure's buffer lanes: each write to an H2D buffer, and each move into or out of an IPC buffer.

        Each piece comes with its rank. The journal does not hold a buffer's content between moves, so no lane draws it.
        """
        every = sorted(((row.rank, piece) for row in self.rows for piece in row.pieces), key=lambda p: p[1].begin)
        lanes = (("H2D buffer", (H2D,)), ("IPC buffer", (DST, SRC)))  # the later ones are drawn over the others
        found = [(name, [p for kind in kinds for p in every if p[1].kind == kind]) for name, kinds in lanes]
        return [(name, pieces) for name, pieces in found if pieces]

    def kinds(self) -> list[str]:
        """Return the kinds of pieces in the rows, in the figure's order."""
        found = {piece.kind for row in self.rows for piece in row.pieces}
        return [kind for kind in KINDS.values() if kind in found]


def transfer(raw: Mapping[str, Any]) -> Transfer | None:
    """Read the transfer from an incident's journal line; None if no worker noted a move."""
    noted = [entry for entry in raw.get("moves") or () if entry["moves"]]
    if not noted:
        return None
    rows: list[TransferRow] = []
    pieces: list[TransferPiece] = []
    for entry in noted:
        mine = [
            TransferPiece(KINDS[s], int(source), float(b), float(e)) for s, source, b, e in entry["moves"] if s in KINDS
        ]
        pieces += mine
        for sends in (True, False):
            part = sorted((p for p in mine if (p.kind in _SENDING) == sends), key=lambda p: p.begin)
            if part and len(rows) < 2 * RANKS_MOST:
                rows.append(TransferRow(int(entry["rank"]), sends, tuple(part)))
    if not pieces:
        return None
    return Transfer(tuple(rows), len(noted), min(p.begin for p in pieces), max(p.end for p in pieces))
