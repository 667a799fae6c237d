"""Draw the controller of figures 002 and 003 as SVG: its reports and orders follow paths that cross no bar and no text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from ftrun.view.timeline import model
from ftrun.view.timeline.axis import Scale
from ftrun.view.timeline.model import Lane, Story
from ftrun.view.timeline.svg_parts import FAILURE, LEFT, words_at

_Y, _WIDE, _HIGH = 126, 58, 18  # the oval
_HEARD, _ORDERS = LEFT - 20, LEFT - 9  # px: the paths up and down, between the lanes' names and their bars
_ABOVE = 10  # px from the top of a lane to the path above its bars


def drawing(story: Story, to: Scale, rows: Sequence[float]) -> Iterator[str]:
    """Yield the controller with its arrows. `rows`: the top of each lane, px."""
    middle = LEFT + (to.at(story.detected) + to.at(story.resumed)) / 2
    tip = f"Controller: noticed after {story.detected:.2f} ms, all went on after {story.resumed:.2f} ms"
    ordered = [(at, lane, target) for at, lane in enumerate(story.lanes) if (target := _target(lane)) is not None]
    failed = next((at for at, lane in enumerate(story.lanes) if lane.fails is not None), None)
    if failed is not None:
        y, bolt = rows[failed] + _ABOVE - 6, LEFT + to.at(0.0)
        yield _arrow(f"M{bolt - 2:.1f} {y} H{_HEARD} V{_Y - 6} H{middle - _WIDE:.1f}")
    if ordered:
        yield _arrow(f"M{middle - _WIDE + 4:.1f} {_Y + 7} H{_ORDERS} V{rows[ordered[-1][0]] + _ABOVE}", head=False)
    for at, lane, begin in ordered:
        x, y = LEFT + to.at(begin), rows[at] + _ABOVE
        if lane.fails is None:
            yield _arrow(f"M{_ORDERS} {y} H{x:.1f} V{y + 10}")
        yield words_at(x + 6, y + 5, _order(lane), "alarm", font_size=11)
    yield f'<g class="controller" data-tip="{escape(tip, quote=True)}"><title>{escape(tip)}</title>'
    oval = f'cx="{middle:.1f}" cy="{_Y}" rx="{_WIDE}" ry="{_HIGH}"'
    yield f'<ellipse class="bubble" {oval} fill="#fff1f1" stroke="{FAILURE}" stroke-width="2"/>'
    yield words_at(middle, _Y + 4, "Controller", "alarm", text_anchor="middle", font_weight="bold")
    yield "</g>"


def _order(lane: Lane) -> str:
    return "Restoration+Rollback" if lane.role in (model.SPARE, model.NEW) else "Stop+Clean+Reset"


def _target(lane: Lane) -> float | None:
    """Return the time at which a lane begins to follow the controller's order, None if it got none."""
    kinds = (model.RESTORATION, model.ROLLBACK) if lane.role in (model.SPARE, model.NEW) else (model.STOP, model.CLEAN, model.RESET)
    return min((bar.begin for bar in lane.bars if bar.kind in kinds), default=None)


def _arrow(path: str, head: bool = True) -> str:
    end = ' marker-end="url(#arrow)"' if head else ""
    return f'<path class="arrow" d="{path}" fill="none" stroke="{FAILURE}" stroke-width="1.2"{end}/>'
