"""Draw a transfer of bytes as SVG, in the form and colours of the design's figure 004."""

from __future__ import annotations

from collections.abc import Iterator

from ftrun.core.amounts import count, milliseconds
from ftrun.view.timeline.axis import Scale
from ftrun.view.timeline.svg_parts import COLOURS, LEFT, RIGHT, WIDTH, break_at, line, rect, swatch, words_at
from ftrun.view.timeline.transfer import Transfer, TransferPiece

_TOP, _ROW, _BAR, _GAP = 56, 22, 16, 36
_WHERE = {True: "sends", False: "takes"}


def height(what: Transfer) -> float:
    """Return the drawing's height, px."""
    return _TOP + _ROW * (len(what.rows) + len(what.buffers())) + 40.0


def drawing(what: Transfer, y: float) -> Iterator[str]:
    """Yield the rows from `y` downwards, with a time axis of their own."""
    yield '<g class="transfer" stroke-width="0.6">'
    yield words_at(16, y + 16, f"How the bytes moved, in {milliseconds(what.end - what.begin)} ms", font_weight="bold")
    for at, kind in enumerate(what.kinds()):
        yield swatch(LEFT + at * 130, y + 26, COLOURS[kind], kind)
    top, to = y + _TOP, what.scale(WIDTH, _GAP)
    for name, pieces in what.buffers():
        yield words_at(16, top + 12, name, font_weight="bold")
        for rank, piece in pieces:
            yield from _piece(to, rank, piece, top, name)
        top += _ROW
    for at, row in enumerate(what.rows):
        if at == 0 or what.rows[at - 1].rank != row.rank:
            yield line(16, top - 2, LEFT + WIDTH + RIGHT - 16, top - 2, "faint")
            yield words_at(16, top + 12, f"rank {row.rank}", font_weight="bold")
        yield words_at(LEFT - 10, top + 12, _WHERE[row.sends], "quiet", text_anchor="end")
        for piece in row.pieces:
            yield from _piece(to, row.rank, piece, top, "")
        top += _ROW
    yield line(LEFT, top + 2, LEFT + WIDTH, top + 2)
    free = LEFT + 70.0  # end of the axis labels so far
    for begin, end in what.idle():
        x, said = LEFT + (to.at(begin) + to.at(end)) / 2, f"{milliseconds(end - begin)} ms"
        yield f'<g class="break"><title>nothing moved for {said}</title>{break_at(x, top + 2)}</g>'
        if free < x - 16 and x + 16 < LEFT + WIDTH - 60:
            yield words_at(x, top + 17, said, "quiet", text_anchor="middle", font_size=10)
            free = x + 20
    yield words_at(LEFT, top + 17, f"{what.begin:+.1f} ms")
    yield words_at(LEFT + WIDTH, top + 17, f"{what.end:+.1f} ms", text_anchor="end")
    drawn = len({row.rank for row in what.rows})
    if what.ranks > drawn:
        yield words_at(16, top + 30, f"and {count(what.ranks - drawn, 'more rank')}", "quiet")
    yield "</g>"


def _piece(to: Scale, rank: int, piece: TransferPiece, y: float, buffer: str) -> Iterator[str]:
    begin, length = LEFT + to.at(piece.begin), to.at(piece.end) - to.at(piece.begin)
    whose = "its own" if piece.source == rank else f"rank {piece.source}'s"
    took = f"{piece.begin:+.2f} to {piece.end:+.2f} ms ({piece.end - piece.begin:.2f} ms)"
    tip = f"{buffer + ', ' if buffer else ''}rank {rank}: {piece.kind}, {whose} bytes, {took}"
    yield f'<g stroke="#777777">{rect(begin, y, length, _BAR, COLOURS[piece.kind], tip, piece.kind)}</g>'
