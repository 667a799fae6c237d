"""Render an incident as one self-contained HTML page: the drawing with times under the pointer, the facts, the parts."""

from __future__ import annotations

from html import escape

from ftrun.core.amounts import milliseconds
from ftrun.view.timeline import svg, words
from ftrun.view.timeline.model import Story

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1240px; padding: 0 1rem; color: #222; background: #fff }
h1 { font-size: 1.3rem } th { text-align: left; vertical-align: top; padding: .1rem 1.2rem .1rem 0; color: #666; font-weight: normal }
.drawing { overflow-x: auto } svg { max-width: none } .bar:hover, .parameters:hover { stroke: #000; stroke-width: 1.5 }
#tip { position: fixed; display: none; background: #222; color: #fff; padding: .3rem .6rem; border-radius: .3rem;
  font-size: 13px; pointer-events: none; max-width: 30rem; z-index: 2 }
.parts td:first-child { width: 7rem } .parts td:nth-child(2) { width: 6rem }
.parts td { padding: .1rem .8rem .1rem 0 } .fill { background: #FF9A8F; height: .8rem }
@media (prefers-color-scheme: dark) {
body { color: #d8dee4; background: #181a1f } th { color: #9aa4ae } .bar:hover, .parameters:hover { stroke: #fff }
#tip { background: #d8dee4; color: #181a1f }
}
"""

_SCRIPT = """
const tip = document.getElementById("tip");
document.addEventListener("pointermove", (event) => {
  const at = event.target.closest("[data-tip]");
  tip.style.display = at ? "block" : "none";
  if (!at) return;
  tip.textContent = at.dataset.tip;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = event.clientY + 18 + "px";
});
"""


def document(story: Story) -> str:
    """Return the whole page."""
    title = escape(words.title(story))
    facts = "\n".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in words.once(story))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n<table>{facts}</table>\n"
        f'<div class="drawing">{svg.drawing(story, titled=False)}</div>\n{_parts(story)}\n<div id="tip"></div>\n'
        f"<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _parts(story: Story) -> str:
    if not story.parts or story.restart:
        return ""
    rows = "\n".join(
        f"<tr><td>{name.replace('_', ' ')}</td><td>{milliseconds(value)} ms</td>"
        f'<td><div class="fill" style="width:{100 * value / max(story.done, 1e-9):.1f}%"></div></td></tr>'
        for name, value in story.parts.items()
    )
    return f'<h2>Where the {story.done:.0f} ms went</h2>\n<table class="parts" style="width:100%">{rows}</table>'
