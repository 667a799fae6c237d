"""How the bytes of a state moved in one incident, as figure 004 shows it. Pure: no drawing, no clock, no files.

Times are ms from the fault. Every bar is a measured one: a worker notes when it did what with each chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftrun.core.shared import notes
from ftrun.view.timeline.axis import Scale

# kinds of bars, in the words of the figure
H2D, SRC, DST, RELOAD = "H2D", "Broadcast (src)", "Broadcast (dst)", "Reload weights"
KINDS = {notes.H2D: H2D, notes.BROADCAST_SRC: SRC, notes.BROADCAST_DST: DST, notes.RELOAD: RELOAD}
RANKS_MOST = 8  # ranks that are drawn
_SENDING = (H2D, SRC)


@dataclass(frozen=True)
class TransferPiece:
    """One chunk in one stage. `source`: the rank whose bytes they were."""

    kind: str
    source: int
    begin: float
    end: float


@dataclass(frozen=True)
class TransferRow:
    """One thread of a rank: what it `sends` (from the host into its buffers), or what it takes into its weights."""

    rank: int
    sends: bool
    pieces: tuple[TransferPiece, ...]


@dataclass(frozen=True)
class Transfer:
    """All that moved. `ranks`: how many took part; of some only, there are rows. `begin`, `end`: of the first and last piece."""

    rows: tuple[TransferRow, ...]
    ranks: int
    begin: float
    end: float

    def idle(self) -> list[tuple[float, float]]:
        """Times in which nothing moved for longer than a quarter of all the time in which something did."""
        gaps, until, busy = [], self.begin, 0.0
        for piece in sorted((p for row in self.rows for p in row.pieces), key=lambda p: p.begin):
            if piece.begin > until:
                gaps.append((until, piece.begin))
            busy += max(0.0, piece.end - max(until, piece.begin))
            until = max(until, piece.end)
        return [(begin, end) for begin, end in gaps if end - begin > 0.25 * busy]

    def scale(self, width: float, gap: float) -> Scale:
        """The place of each time on an axis `width` wide, on which times without any move are only `gap` wide."""
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
        """The figure's lanes of buffers: when any rank filled its H2D buffer, and when bytes went into or out of an IPC buffer.

        Each piece with the rank that did it. What lay in a buffer meanwhile was not noted, and is not drawn.
        """
        every = sorted(((row.rank, piece) for row in self.rows for piece in row.pieces), key=lambda p: p[1].begin)
        lanes = (("H2D buffer", (H2D,)), ("IPC buffer", (DST, SRC)))  # the later ones are drawn over the others
        found = [(name, [p for kind in kinds for p in every if p[1].kind == kind]) for name, kinds in lanes]
        return [(name, pieces) for name, pieces in found if pieces]

    def kinds(self) -> list[str]:
        """Those that there are, in the figure's order."""
        found = {piece.kind for row in self.rows for piece in row.pieces}
        return [kind for kind in KINDS.values() if kind in found]


def transfer(raw: Mapping[str, Any]) -> Transfer | None:
    """What an incident's journal line holds of it; None when nothing moved, or nobody noted it."""
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
