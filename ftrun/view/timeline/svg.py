"""Draw an incident as SVG, in the form and colours of the design's figures 000 to 003."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ftrun.core.amounts import count, milliseconds
from ftrun.view import text
from ftrun.view.timeline import model, svg_controller, svg_transfer, words
from ftrun.view.timeline.axis import Scale
from ftrun.view.timeline.model import Bar, Lane, Story
from ftrun.view.timeline.scale import scale
from ftrun.view.timeline.svg_parts import (
    COLOURS,
    DARK_BARS,
    DEFINITIONS,
    FAILURE,
    LEFT,
    NOT_UPDATED,
    RIGHT,
    STYLE,
    UPDATED,
    WIDTH,
    break_at,
    line,
    rect,
    swatch,
    words_at,
)

_TITLE = 54  # px of the title
_TOP, _LANE, _BAR = 216, 84, 30
_BAND, _BAND_HEIGHT = 184, 18
_SQUARE = 9
_NAMED = 4  # failed ranks that fit into the line under the title
_CHAR = 6.6  # approximate width of a character in px, at font size 12
_PLACE = 22  # characters of a lane's place on the mesh


def document(story: Story) -> str:
    """Return a whole SVG file."""
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{drawing(story)}\n'


def drawing(story: Story, titled: bool = True) -> str:
    """Return the <svg> element. `titled`: draw the title too, which a page with its own title does not need."""
    to = scale(story, WIDTH)
    lanes = _TOP + _LANE * len(story.lanes) + 70
    bottom = lanes + (svg_transfer.height(story.transfer) if story.transfer else 0)
    width, top = LEFT + WIDTH + RIGHT, 0 if titled else _TITLE
    title = _title(story) if titled else ()
    rows = [_y(at) for at in range(len(story.lanes))]
    controller = svg_controller.drawing(story, to, rows)
    body = "\n".join([*title, *_legend(story), *_bands(story, to), *_marks(story, to), *_barriers(story, to), *_lanes(story, to)])
    body += "\n" + "\n".join([*controller, *_axis(story, to)])
    if story.transfer is not None:
        body += "\n" + "\n".join(svg_transfer.drawing(story.transfer, lanes))
    label = escape(words.title(story), quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {top} {width} {bottom - top}" width="{width}" height="{bottom - top}" '
        f'role="img" aria-label="{label}" font-family="system-ui, sans-serif" font-size="12">\n{STYLE}\n'
        f'<rect class="paper" y="{top}" width="100%" height="100%" fill="#ffffff"/>\n{DEFINITIONS}\n{body}\n</svg>'
    )


def _title(story: Story) -> Iterator[str]:
    yield words_at(16, 26, words.title(story), font_size=16, font_weight="bold")
    failed = "; ".join(words.what(v) for v in story.victims[:_NAMED]) or f"every rank waited in {story.stuck}"
    if len(story.victims) > _NAMED:
        failed += f"; and {count(len(story.victims) - _NAMED, 'more rank')}"
    yield words_at(16, 46, f"{failed}: repaired in {milliseconds(story.done)} ms", "quiet")


def _legend(story: Story) -> Iterator[str]:
    """Yield the legend: first the parameters and the parts of a step, then the parts of the repair."""
    drawn = {bar.kind for lane in story.lanes for bar in lane.bars}
    step = [(COLOURS[kind], _short(kind)) for kind in model.TRAINING if kind in drawn]
    squares = [(NOT_UPDATED, "Parameters not updated"), (UPDATED, "Parameters updated")]
    repair = [(COLOURS[kind], kind) for kind in model.REPAIR if kind in drawn]
    if any(model.done_again(bar, story) for lane in story.lanes for bar in lane.bars):
        repair.append(("url(#again)", "done again"))
    for row, entries in enumerate((squares + step, repair)):
        x = 16.0
        for fill, said in entries:
            back = f'<rect x="{x}" y="{62 + row * 20}" width="12" height="12" fill="{COLOURS[model.BACKWARD]}"/>'
            yield (back if fill.startswith("url") else "") + swatch(x, 62 + row * 20, fill, said)
            x += 42 + len(said) * _CHAR


def _short(kind: str) -> str:
    return "Waiting" if kind == model.SYNC else kind


# -- lanes ---------------------------------------------------------------------------------------------------------------


def _y(at: int) -> float:
    return _TOP + at * _LANE


def _lanes(story: Story, to: Scale) -> Iterator[str]:
    for at, lane in enumerate(story.lanes):
        y = _y(at)
        yield f'<g class="lane" data-role="{lane.role}" data-rank="{lane.rank}">'
        yield words_at(16, y + 34, lane.label, font_weight="bold")
        yield words_at(16, y + 49, _role(lane), "alarm" if lane.role == model.FAILED else "quiet")
        if lane.place:
            yield words_at(16, y + 64, _place(lane), "quiet", font_size=11)
        for bar in lane.bars:
            yield from _bar(bar, lane, y, to, story)
        yield from _parameters(story, lane, y, to)
        if lane.fails is not None:
            yield from _bolt(LEFT + to.at(lane.fails), y + 14)
        yield "</g>"
    if story.folded > 0:
        y = _y(len(story.lanes))
        yield words_at(16, y + 4, f"and {count(story.folded, 'rank')} more like the healthy ones", "quiet")


def _place(lane: Lane) -> str:
    """Return the mesh coordinates, shortened to the room there is; the bars' tips hold them in full."""
    whole = lane.place if text.width_of(lane.place) <= _PLACE else f"mesh {lane.short}"
    return text.plain(text.cut([(whole, text.QUIET)], _PLACE))


def _role(lane: Lane) -> str:
    return f"takes rank {lane.rank}" if lane.role in (model.SPARE, model.NEW) else lane.role


def _bar(bar: Bar, lane: Lane, y: float, to: Scale, story: Story) -> Iterator[str]:
    begin, end = LEFT + to.at(bar.begin), LEFT + to.at(bar.end)
    how, redone = "; cut off" if bar.broken else "", model.done_again(bar, story)
    again = " again" if redone else ""
    step = f" of step {bar.step}{again}" if bar.step >= 0 else ""
    tip = f"{lane.named}: {bar.kind}{step}, {bar.begin:+.2f} to {bar.end:+.2f} ms ({bar.end - bar.begin:.2f} ms{how})"
    yield rect(begin, y + 20, end - begin, _BAR, COLOURS[bar.kind], tip, bar.kind)
    if redone and end - begin > 3:
        shape = f'x="{begin:.1f}" y="{y + 44}" width="{end - begin:.1f}" height="6"'
        yield f'<rect class="again" {shape} fill="url(#again)" pointer-events="none"/>'
    said = f"{bar.kind}{again}" if len(bar.kind + again) * _CHAR + 6 <= end - begin else bar.kind
    if len(said) * _CHAR + 6 <= end - begin:
        look = "on-dark" if bar.kind in DARK_BARS else "on"
        yield words_at((begin + end) / 2, y + 38, said, look, text_anchor="middle", pointer_events="none")


def _bolt(x: float, y: float) -> Iterator[str]:
    points = ((4, -14), (-8, 8), (0, 8), (-5, 28), (11, 2), (2, 2), (9, -14))
    shape = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in points)
    yield f'<polygon class="failure" points="{shape}" fill="{FAILURE}" stroke="#8B0000" stroke-width="0.7"/>'
    yield words_at(x + 14, y + 24, "Failure", "alarm", font_weight="bold")


# -- parameters ----------------------------------------------------------------------------------------------------------


def _parameters(story: Story, lane: Lane, y: float, to: Scale) -> Iterator[str]:
    """Yield rows of squares: at the step's start, in the optimizer step, at the failure, at the resumption."""
    taken: list[tuple[float, float]] = []
    for held in model.held(lane, story):
        place, number = held.place(to.at, _SQUARE + 1, 14)
        x = LEFT + place
        taken.append((x, x + number * (_SQUARE + 1)))
        full = round(held.share * number)
        tip = f"{lane.named}: parameters {_known(held.share)}, {held.time:+.1f} ms"
        yield f'<g class="parameters" data-tip="{escape(tip, quote=True)}"><title>{escape(tip)}</title>'
        yield from (_square(x + k * (_SQUARE + 1), y, 1.0 if k < full else 0.0) for k in range(number))
        yield "</g>"
    for bar in lane.updates():
        yield from _turning(bar, lane, y, to, taken)


def _turning(bar: Bar, lane: Lane, y: float, to: Scale, taken: list[tuple[float, float]]) -> Iterator[str]:
    """Yield squares below an optimizer step that grow lighter with its progress, where there is room."""
    begin, end = LEFT + to.at(bar.begin), LEFT + to.at(bar.end)
    places = [begin + k * (_SQUARE + 1) for k in range(int((end - begin) // (_SQUARE + 1)))]
    free = [x for x in places if all(x + _SQUARE < a or x > b for a, b in taken)]
    if not free:
        return
    tip = f"{lane.named}: parameters in the optimizer step of step {bar.step}: updated one after the other"
    yield f'<g class="parameters turning" data-tip="{escape(tip, quote=True)}"><title>{escape(tip)}</title>'
    most = 0.5 if bar.broken else 1.0  # the journal does not hold the progress of a torn update
    yield from (_square(x, y, most * (x + _SQUARE - begin) / max(end - begin, 1e-9)) for x in free)
    yield "</g>"


def _square(x: float, y: float, share: float) -> str:
    """Return a square whose lower part, `share` of it, is light."""
    light = round(_SQUARE * max(0.0, min(1.0, share)), 1)
    dark = f'<rect x="{x:.1f}" y="{y + 55}" width="{_SQUARE}" height="{_SQUARE}" fill="{NOT_UPDATED if light < _SQUARE else UPDATED}"/>'
    if not 0 < light < _SQUARE:
        return dark
    return dark + f'<rect x="{x:.1f}" y="{y + 55 + _SQUARE - light:.1f}" width="{_SQUARE}" height="{light}" fill="{UPDATED}"/>'


def _known(share: float) -> str:
    return "updated" if share == 1.0 else "not updated" if share == 0.0 else "in the middle of being updated"


# -- across the lanes ------------------------------------------------------------------------------------------------------


def _bands(story: Story, to: Scale) -> Iterator[str]:
    for kind, since, until in model.bands(story):
        begin, end = LEFT + to.at(since), LEFT + to.at(until)
        tip = f"{kind}, {since:+.1f} to {until:+.1f} ms"
        yield f'<g class="band">{rect(begin, _BAND, end - begin, _BAND_HEIGHT, COLOURS[kind], tip, kind)}'
        if len(kind) * _CHAR <= end - begin:
            yield words_at((begin + end) / 2, _BAND + 13, kind, "on", text_anchor="middle", pointer_events="none")
        yield "</g>"


def _barriers(story: Story, to: Scale) -> Iterator[str]:
    for step, at in story.barriers:
        x, bottom = LEFT + to.at(at), _y(len(story.lanes)) - 14
        tip = f"Gradient Synchronization Barrier of step {step}: every rank had arrived, {at:+.2f} ms"
        yield f'<g class="barrier" data-tip="{escape(tip, quote=True)}"><title>{escape(tip)}</title>'
        yield line(x, _BAND - 4, x, bottom, style=f"stroke:{FAILURE}", stroke_width=2)
        middle = min(x, LEFT + WIDTH + RIGHT - 84)  # the last barrier is near the edge
        yield f'<rect class="chip" x="{middle - 82:.1f}" y="{_BAND - 36}" width="164" height="32" rx="4" fill="#fde3e3"/>'
        yield words_at(middle, _BAND - 23, "Gradient Synchronization", "alarm", text_anchor="middle")
        yield words_at(middle, _BAND - 10, "Barrier", "alarm", text_anchor="middle")
        yield "</g>"


def _moments(story: Story) -> list[tuple[float, str]]:
    return [*story.moments, (story.done, "every rank did a new step" if story.going_on.in_step else "every rank was past it")]


def _marks(story: Story, to: Scale) -> Iterator[str]:
    """Yield dashed lines at the moments of the axis, behind everything."""
    for moment, _ in _moments(story):
        x = LEFT + to.at(moment)
        yield line(x, _TOP, x, _y(len(story.lanes)) + 17, "faint", stroke_dasharray="3 4")


def _axis(story: Story, to: Scale) -> Iterator[str]:
    """Yield the time axis, with a break at each change of scale."""
    y = _y(len(story.lanes)) + 12
    yield line(LEFT, y, LEFT + WIDTH, y)
    marks = _moments(story)
    for at, (moment, name) in enumerate(marks):
        x = LEFT + to.at(moment)
        anchor = "start" if not at else "end" if at == len(marks) - 1 else "middle"
        if 0 < at < len(marks) - 1:
            yield f'<g class="break"><title>the time scale changes here</title>{break_at(x, y)}</g>'
        yield words_at(x, y + 21, f"{moment:+.1f} ms" if moment else "0 ms", text_anchor=anchor)
        yield words_at(x, y + 36, name, "quiet", text_anchor=anchor)
    yield words_at(16, y + 4, "time", "quiet")
    yield words_at(LEFT, y + 52, "each of the three sections has a time scale of its own", "quiet", font_size=10)
