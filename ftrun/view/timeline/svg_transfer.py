"""How the bytes moved, as SVG in the form and colours of the design's figure 004."""

from __future__ import annotations

from collections.abc import Iterator

from ftrun.core.amounts import count, milliseconds
from ftrun.view.timeline import transfer
from ftrun.view.timeline.svg_parts import LEFT, RIGHT, WIDTH, rect, words_at
from ftrun.view.timeline.transfer import Transfer, TransferPiece, TransferRow

COLOURS = {transfer.H2D: "#FFFFFF", transfer.SRC: "#FFD54A", transfer.DST: "#FFF3C4", transfer.RELOAD: "#F2A541"}
_TOP, _ROW, _BAR = 52, 22, 16
_WHERE = {True: "sends", False: "takes"}


def height(what: Transfer) -> float:
    """Of the drawing, px."""
    return _TOP + _ROW * len(what.rows) + 34.0


def drawing(what: Transfer, y: float) -> Iterator[str]:
    """The rows, from `y` down; their time axis is their own."""
    yield '<g class="transfer" stroke-width="0.6">'
    yield words_at(16, y + 16, f"How the bytes moved, in {milliseconds(what.end - what.begin)} ms", font_weight="bold")
    yield from _legend(what, y + 26)
    for at, row in enumerate(what.rows):
        yield from _row(what, row, y + _TOP + at * _ROW, at == 0 or what.rows[at - 1].rank != row.rank)
    bottom = y + _TOP + _ROW * len(what.rows)
    yield f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{bottom}" y2="{bottom}" stroke="#555"/>'
    yield words_at(LEFT, bottom + 15, f"{what.begin:+.1f} ms")
    yield words_at(LEFT + WIDTH, bottom + 15, f"{what.end:+.1f} ms", text_anchor="end")
    drawn = len({row.rank for row in what.rows})
    if what.ranks > drawn:
        yield words_at(16, bottom + 28, f"and {count(what.ranks - drawn, 'more rank')}", fill="#555")
    yield "</g>"


def _legend(what: Transfer, y: float) -> Iterator[str]:
    x = float(LEFT)
    for kind in what.kinds():
        yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[kind]}" stroke="#777"/>'
        yield words_at(x + 18, y + 10, kind)
        x += 130


def _row(what: Transfer, row: TransferRow, y: float, named: bool) -> Iterator[str]:
    if named:
        yield f'<line x1="16" x2="{LEFT + WIDTH + RIGHT - 16}" y1="{y - 2}" y2="{y - 2}" stroke="#ddd"/>'
        yield words_at(16, y + 12, f"rank {row.rank}", font_weight="bold")
    yield words_at(LEFT - 10, y + 12, _WHERE[row.sends], text_anchor="end", fill="#555")
    for piece in row.pieces:
        yield from _piece(what, row, piece, y)


def _piece(what: Transfer, row: TransferRow, piece: TransferPiece, y: float) -> Iterator[str]:
    scale = WIDTH / max(what.end - what.begin, 1e-9)
    begin, length = LEFT + (piece.begin - what.begin) * scale, (piece.end - piece.begin) * scale
    whose = "its own" if piece.source == row.rank else f"rank {piece.source}'s"
    took = f"{piece.begin:+.2f} to {piece.end:+.2f} ms ({piece.end - piece.begin:.2f} ms)"
    tip = f"rank {row.rank}: {piece.kind}, {whose} bytes, {took}"
    yield f'<g stroke="#777">{rect(begin, y, length, _BAR, COLOURS[piece.kind], tip, piece.kind)}</g>'
