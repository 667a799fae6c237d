"""What the parts of an SVG drawing are made of."""

from __future__ import annotations

from html import escape

LEFT, WIDTH, RIGHT = 150, 1000, 30  # px: the names, the axis, the margin


def words_at(x: float, y: float, said: str, **look: object) -> str:
    """A line of text."""
    more = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in look.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(said)}</text>'


def rect(x: float, y: float, width: float, height: float, fill: str, tip: str, kind: str) -> str:
    """A rectangle that says `tip` when pointed at."""
    return (
        f'<rect class="bar" data-kind="{escape(kind)}" data-tip="{escape(tip, quote=True)}" x="{x:.1f}" y="{y:.1f}" '
        f'width="{max(width, 1.0):.1f}" height="{height}" fill="{fill}"><title>{escape(tip)}</title></rect>'
    )
