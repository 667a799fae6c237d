"""Provide the elements of an SVG drawing, and its colours in light and dark mode."""

from __future__ import annotations

from html import escape

from ftrun.view.timeline import model, transfer

LEFT, WIDTH, RIGHT = 176, 1000, 30  # px: the names, the axis, the margin

COLOURS = {
    model.FORWARD: "#00BFFF",
    model.BACKWARD: "#2E8B57",
    model.SYNC: "#F4B6B6",
    model.OPTIMIZER: "#FFA500",
    model.STOP: "#FF0000",
    model.CLEAN: "#FF5A4D",
    model.RESET: "#FF9A8F",
    model.RESTORATION: "#8E6BD1",
    model.RELOAD: "#A0522D",
    model.ROLLBACK: "#C4B3EA",
    model.CONSISTENT: "#DCE9F5",
    model.UPDATING: "#FFE4B5",
    transfer.H2D: "#FFFFFF",
    transfer.SRC: "#FFD54A",
    transfer.DST: "#FFF3C4",
}
NOT_UPDATED, UPDATED, FAILURE = "#2E8B57", "#90EE90", "#FF0000"
DARK_BARS = (model.BACKWARD, model.STOP, model.RESTORATION, model.RELOAD)  # bars with white text

# browsers read this style sheet; programs without style sheets read the presentation attributes
STYLE = """<style>
.paper { fill: #ffffff } text { fill: #1b1f24 } .quiet { fill: #57606a } .alarm { fill: #d1242f }
.line { stroke: #57606a } .faint { stroke: #a8b0b8 } .chip { fill: #fde3e3 } .bubble { fill: #fff1f1 } .edge { stroke: #777777 }
.on { fill: #000000 } .on-dark { fill: #ffffff }
@media (prefers-color-scheme: dark) {
.paper { fill: #181a1f } text { fill: #d8dee4 } .quiet { fill: #9aa4ae } .alarm { fill: #ff7b72 }
.line { stroke: #9aa4ae } .faint { stroke: #57606a } .chip { fill: #4a1f22 } .bubble { fill: #3a1d20 } .edge { stroke: #101216 }
.on { fill: #000000 } .on-dark { fill: #ffffff }
}
</style>"""
DEFINITIONS = (
    '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
    f'<path d="M0 0L10 5L0 10z" fill="{FAILURE}"/></marker>'
    '<pattern id="again" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2.5" height="7" fill="#ffffff" fill-opacity="0.55"/></pattern></defs>'
)
_PLAIN = {"quiet": "#57606a", "alarm": "#d1242f", "on-dark": "#ffffff"}


def words_at(x: float, y: float, said: str, look: str = "", **more: object) -> str:
    """Return a line of text. `look`: "", quiet, alarm, on (a bar), on-dark."""
    kind = f' class="{look}" fill="{_PLAIN.get(look, "#1b1f24")}"' if look else ""
    kind += "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{escape(said)}</text>'


def rect(x: float, y: float, width: float, height: float, fill: str, tip: str, kind: str) -> str:
    """Return a rectangle that shows `tip` under the pointer."""
    return (
        f'<rect class="bar" data-kind="{escape(kind)}" data-tip="{escape(tip, quote=True)}" x="{x:.1f}" y="{y:.1f}" '
        f'width="{max(width, 1.0):.1f}" height="{height}" fill="{fill}"><title>{escape(tip)}</title></rect>'
    )


def swatch(x: float, y: float, fill: str, said: str, width: float = 12) -> str:
    """Return a legend entry."""
    return f'<rect class="edge" x="{x}" y="{y}" width="{width}" height="12" fill="{fill}"/>' + words_at(x + width + 6, y + 10, said)


def line(x1: float, y1: float, x2: float, y2: float, look: str = "line", **more: object) -> str:
    """Return a straight line. `look`: line, faint."""
    rest = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    return f'<line class="{look}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#777777"{rest}/>'


def break_at(x: float, y: float) -> str:
    """Return the mark of a change of scale on an axis."""
    hole = f'<rect class="paper" x="{x - 3.5:.1f}" y="{y - 2}" width="7" height="4" fill="#ffffff"/>'
    return hole + line(x - 6.5, y + 6, x - 0.5, y - 6) + line(x + 0.5, y + 6, x + 6.5, y - 6)
