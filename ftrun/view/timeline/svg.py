"""An incident as SVG, in the form and colours of the design's figures 000 to 003."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ftrun.core.amounts import count, milliseconds
from ftrun.view.timeline import model, svg_transfer, words
from ftrun.view.timeline.model import Bar, Lane, Story
from ftrun.view.timeline.scale import Scale, scale
from ftrun.view.timeline.svg_parts import LEFT, RIGHT, WIDTH, rect, words_at

COLOURS = {
    model.FORWARD: "#00BFFF",
    model.BACKWARD: "#2E8B57",
    model.SYNC: "#F4B6B6",
    model.OPTIMIZER: "#FFA500",
    model.STOP: "#FF0000",
    model.CLEAN: "#FF5A4D",
    model.RESET: "#FF9A8F",
    model.RESTORATION: "#8E6BD1",
    model.RELOAD: "#F2A541",
    model.ROLLBACK: "#C4B3EA",
}
NOT_UPDATED, UPDATED, FAILURE = "#2E8B57", "#90EE90", "#FF0000"
_TOP, _LANE, _BAR = 170, 84, 30
_SQUARES, _SQUARE = 10, 9
_NAMED = 4  # failed ranks that fit into the line under the title
_CHAR = 6.6  # px of a character, about, at 12 px


def document(story: Story) -> str:
    """A whole SVG file."""
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{drawing(story)}\n'


def drawing(story: Story) -> str:
    """The <svg> element."""
    to = scale(story, WIDTH)
    lanes = _TOP + _LANE * len(story.lanes) + 70
    height = lanes + (svg_transfer.height(story.transfer) if story.transfer else 0)
    width = LEFT + WIDTH + RIGHT
    body = "\n".join([*_title(story), *_legend(), *_barriers(story, to), *_lanes(story, to)])
    body += "\n" + "\n".join([*_controller(story, to), *_axis(story, to)])
    if story.transfer is not None:
        body += "\n" + "\n".join(svg_transfer.drawing(story.transfer, lanes))
    label = escape(words.title(story), quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{label}" font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{_DEFINITIONS}\n{body}\n</svg>'
    )


_DEFINITIONS = (
    '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
    f'<path d="M0 0L10 5L0 10z" fill="{FAILURE}"/></marker></defs>'
)


def _title(story: Story) -> Iterator[str]:
    yield words_at(16, 26, words.title(story), font_size=16, font_weight="bold")
    failed = "; ".join(words.what(v) for v in story.victims[:_NAMED]) or f"every rank waited in {story.stuck}"
    if len(story.victims) > _NAMED:
        failed += f"; and {count(len(story.victims) - _NAMED, 'more rank')}"
    yield words_at(16, 46, f"{failed}: repaired in {milliseconds(story.done)} ms", fill="#444")


def _legend() -> Iterator[str]:
    for at, (colour, name) in enumerate(((NOT_UPDATED, "Parameters not updated"), (UPDATED, "Parameters updated"))):
        y = 62 + at * 18
        yield f'<rect x="16" y="{y}" width="12" height="12" fill="{colour}"/>'
        yield words_at(34, y + 10, name)
    kinds = (model.FORWARD, model.BACKWARD, model.SYNC, model.OPTIMIZER)
    for at, kind in enumerate(kinds):
        x, y = 190 + at // 2 * 110, 62 + at % 2 * 18
        yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[kind]}"/>'
        yield words_at(x + 18, y + 10, "Waiting" if kind == model.SYNC else kind)


# -- lanes ---------------------------------------------------------------------------------------------------------------


def _y(at: int) -> float:
    return _TOP + at * _LANE


def _lanes(story: Story, to: Scale) -> Iterator[str]:
    for at, lane in enumerate(story.lanes):
        y = _y(at)
        yield f'<g class="lane" data-role="{lane.role}" data-rank="{lane.rank}">'
        yield words_at(16, y + 34, lane.label, font_weight="bold")
        yield words_at(16, y + 49, _role(lane), fill=FAILURE if lane.role == model.FAILED else "#555")
        for bar in lane.bars:
            yield from _bar(bar, lane, y, to)
        yield from _parameters(story, lane, y, to)
        if lane.fails is not None:
            yield from _bolt(LEFT + to.at(lane.fails), y + 14)
        yield "</g>"
    if story.folded > 0:
        y = _y(len(story.lanes))
        yield words_at(16, y + 4, f"and {count(story.folded, 'rank')} more like the healthy ones", fill="#555")


def _role(lane: Lane) -> str:
    return f"takes rank {lane.rank}" if lane.role in (model.SPARE, model.NEW) else lane.role


def _bar(bar: Bar, lane: Lane, y: float, to: Scale) -> Iterator[str]:
    begin, end = LEFT + to.at(bar.begin), LEFT + to.at(bar.end)
    how = "; cut off" if bar.broken else ""
    again = ", again" if bar.again else ""
    step = f" of step {bar.step}{again}" if bar.step >= 0 else ""
    tip = f"{lane.label}: {bar.kind}{step}, {bar.begin:+.2f} to {bar.end:+.2f} ms ({bar.end - bar.begin:.2f} ms{how})"
    yield rect(begin, y + 20, end - begin, _BAR, COLOURS[bar.kind], tip, bar.kind)
    if len(bar.kind) * _CHAR + 6 <= end - begin:
        dark = bar.kind in (model.BACKWARD, model.STOP, model.RESTORATION)
        fill = "#ffffff" if dark else "#000000"
        yield words_at((begin + end) / 2, y + 39, bar.kind, text_anchor="middle", fill=fill, pointer_events="none")


def _bolt(x: float, y: float) -> Iterator[str]:
    points = ((4, -14), (-8, 8), (0, 8), (-5, 28), (11, 2), (2, 2), (9, -14))
    shape = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in points)
    yield f'<polygon class="failure" points="{shape}" fill="{FAILURE}" stroke="#8B0000" stroke-width="0.7"/>'
    yield words_at(x + 14, y + 24, "Failure", fill=FAILURE, font_weight="bold")


def _parameters(story: Story, lane: Lane, y: float, to: Scale) -> Iterator[str]:
    """Rows of squares: as the step began, at the failure, as training went on."""
    wide = _SQUARES * (_SQUARE + 1)
    moments = [] if lane.role in (model.SPARE, model.NEW) else [(story.begins, 0.0)]
    moments += [(0.0, -wide - 14.0)] if lane.role == model.FAILED else [(story.resumed, 0.0)]
    for moment, shift in moments:
        share = 0.0 if moment == story.begins else model.updated(lane, moment, story)
        full = round(share * _SQUARES)
        x = max(LEFT, min(LEFT + WIDTH - wide, LEFT + to.at(moment) + shift))
        tip = f"{lane.label}: parameters {_known(share)}, {moment:+.1f} ms"
        yield f'<g class="parameters" data-tip="{escape(tip, quote=True)}"><title>{escape(tip)}</title>'
        for k in range(_SQUARES):
            colour = UPDATED if k < full else NOT_UPDATED
            yield f'<rect x="{x + k * (_SQUARE + 1):.1f}" y="{y + 55}" width="{_SQUARE}" height="{_SQUARE}" fill="{colour}"/>'
        yield "</g>"


def _known(share: float) -> str:
    return "updated" if share == 1.0 else "not updated" if share == 0.0 else "in the middle of being updated"


# -- what is drawn across the lanes ----------------------------------------------------------------------------------------


def _barriers(story: Story, to: Scale) -> Iterator[str]:
    for step, at in story.barriers:
        x, bottom = LEFT + to.at(at), _y(len(story.lanes)) - 14
        tip = f"Gradient Synchronization Barrier of step {step}: every rank had arrived, {at:+.2f} ms"
        yield f'<g class="barrier" data-tip="{escape(tip, quote=True)}"><title>{escape(tip)}</title>'
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{bottom}" stroke="{FAILURE}" stroke-width="2"/>'
        middle = min(x, LEFT + WIDTH + RIGHT - 84)  # the last barrier is near the edge
        yield f'<rect x="{middle - 82:.1f}" y="{_TOP - 40}" width="164" height="30" rx="4" fill="#FDE3E3"/>'
        yield words_at(middle, _TOP - 27, "Gradient Synchronization", text_anchor="middle", fill=FAILURE)
        yield words_at(middle, _TOP - 14, "Barrier", text_anchor="middle", fill=FAILURE)
        yield "</g>"


def _controller(story: Story, to: Scale) -> Iterator[str]:
    heard, resumed = LEFT + to.at(story.detected), LEFT + to.at(story.resumed)
    middle, y = (heard + resumed) / 2, 84.0
    tip = f"Controller: noticed after {story.detected:.2f} ms, all went on after {story.resumed:.2f} ms"
    yield f'<g class="controller" data-tip="{escape(tip, quote=True)}"><title>{escape(tip)}</title>'
    yield f'<ellipse cx="{middle:.1f}" cy="{y}" rx="58" ry="20" fill="#FFF1F1" stroke="{FAILURE}" stroke-width="2"/>'
    yield words_at(middle, y + 4, "Controller", text_anchor="middle", fill=FAILURE, font_weight="bold")
    yield "</g>"
    failed = next((at for at, lane in enumerate(story.lanes) if lane.fails is not None), None)
    if failed is not None:
        start = LEFT + to.at(0.0)
        yield _arrow(f"M{start:.1f} {_y(failed)} V{y} H{middle - 60:.1f}")
    for at, lane in enumerate(story.lanes):
        target = _target(lane)
        if target is None:
            continue
        name = "Restoration+Rollback" if lane.role in (model.SPARE, model.NEW) else "Stop+Clean+Reset"
        begin, end = LEFT + to.at(target[0]), LEFT + to.at(target[1])
        yield _arrow(f"M{middle:.1f} {y + 20} V{_y(at) + 6} H{min(max(middle, begin), end):.1f} v12")
        yield words_at(begin, _y(at) + 13, name, fill=FAILURE, font_size=11)


def _target(lane: Lane) -> tuple[float, float] | None:
    """From when to when the controller's order kept a lane busy."""
    kinds = (
        (model.RESTORATION, model.ROLLBACK)
        if lane.role in (model.SPARE, model.NEW)
        else (model.STOP, model.CLEAN, model.RESET)
    )
    busy = [bar for bar in lane.bars if bar.kind in kinds]
    return (busy[0].begin, busy[-1].end) if busy else None


def _arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{FAILURE}" stroke-width="1.2" stroke-opacity="0.55" marker-end="url(#arrow)"/>'


def _axis(story: Story, to: Scale) -> Iterator[str]:
    y = _y(len(story.lanes)) + 12
    yield f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}" stroke="#555"/>'
    step = story.step if story.step is not None else story.resume
    marks = [
        (story.begins, f"step {step}"),
        (0.0, "failure"),
        (story.resumed, f"step {story.resume}"),
        (story.done, "every rank did a new step"),
    ]
    for at, (moment, name) in enumerate(marks):
        x = LEFT + to.at(moment)
        anchor = "start" if not at else "end" if at == len(marks) - 1 else "middle"
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{y + 5}" stroke="#999" stroke-dasharray="3 4"/>'
        yield words_at(x, y + 20, f"{moment:+.1f} ms" if moment else "0 ms", text_anchor=anchor)
        yield words_at(x, y + 35, name, text_anchor=anchor, fill="#555")
    yield words_at(16, y + 4, "time", fill="#555")
    yield words_at(LEFT, y + 52, "each of the three sections has a time scale of its own", fill="#777", font_size=10)
