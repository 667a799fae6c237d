"""Draw an incident as text: the facts in words, the lanes as rows of characters, and the milliseconds of each part."""

from __future__ import annotations

from collections.abc import Iterable

from ftrun.core.amounts import count, milliseconds, size
from ftrun.view import text
from ftrun.view.text import BAD, GOOD, HEAD, PLAIN, QUIET, STRONG, WARN, Line
from ftrun.view.timeline import model, transfer, words
from ftrun.view.timeline.axis import Scale
from ftrun.view.timeline.model import Bar, Lane, Story
from ftrun.view.timeline.scale import scale
from ftrun.view.timeline.transfer import Transfer, TransferPiece

_LABEL = 17  # least columns for the lanes' names
_LABEL_PART, _AROUND = 3, 3  # a place on the mesh may take a third of the width, with three blanks around it
_LEAST, _MOST = 60, 200
_LOOK = {  # kind: character without a label, style, the label
    model.FORWARD: ("░", text.FORWARD, "Forward"),
    model.BACKWARD: ("▒", text.BACKWARD, "Backward"),
    model.SYNC: ("·", text.BARRIER, "sync"),
    model.OPTIMIZER: ("▓", text.UPDATE, "Optimizer Step"),
    model.STOP: ("▚", BAD, "Stop"),
    model.CLEAN: ("▞", BAD, "Clean"),
    model.RESET: ("█", BAD, "Reset"),
    model.RESTORATION: ("█", text.DONE, "Restoration"),
    model.RELOAD: ("▓", text.CONTROL, "Reload"),
    model.ROLLBACK: ("═", text.DONE, "Rollback"),
}
_BOLT, _AGAIN = "↯", "again"
_BANDS = {model.CONSISTENT: ("─", QUIET), model.UPDATING: ("═", text.UPDATE)}
_TURNING = "□◧■"  # squares in an optimizer step


def drawing(story: Story, width: int) -> list[Line]:
    """Return the whole report on one incident, at most `width` columns wide (clamped to 60 to 200)."""
    width = max(_LEAST, min(_MOST, width))
    lines: list[Line] = [[(words.title(story), HEAD)], []]
    before = ""
    for label, sentence in words.facts(story):
        lines += _wrapped(label if label != before else "", sentence, width, label)
        before = label
    if story.in_tail:
        return lines
    if story.lanes:
        lines += [[], *lanes(story, width), *_legend(story, width)]
    if story.transfer is not None:
        lines += [[], *moved(story.transfer, width)]
    if story.parts and not story.restart:
        lines += [[], *where(story, width)]
    return lines


def _wrapped(shown: str, sentence: str, width: int, label: str) -> list[Line]:
    rows, row = [], ""
    for word in sentence.split():
        if row and len(row) + 1 + len(word) > width - 16:
            rows.append(row)
            row = ""
        row = f"{row} {word}".strip()
    rows.append(row)
    style = BAD if label in ("what failed", "why") else STRONG if label == "cost" else PLAIN
    return [[((shown if not at else "").ljust(15) + " ", QUIET), (r, style)] for at, r in enumerate(rows)]


# -- lanes ---------------------------------------------------------------------------------------------------------------


def lanes(story: Story, width: int) -> list[Line]:
    """Return two rows for each process, with the controller, barriers and bands above and the axis below."""
    named = _columns(story, width)
    room = width - named
    to = scale(story, room - 1)
    above = [_controller(story, to, room), _barrier_names(story, to, room), _bands(story, to, room)]
    lines = _beside(above, named)
    for lane in story.lanes:
        lines += _lane(story, lane, to, room, named)
    if story.folded > 0:
        lines.append([(f"and {count(story.folded, 'rank')} more like the healthy ones", QUIET)])
    return [*lines, *_beside(_axis(story, to, room), named)]


def _columns(story: Story, width: int) -> int:
    """Return the columns that the lanes' names take."""
    whole = max((text.width_of(lane.place) for lane in story.lanes), default=0) + _AROUND
    short = max((text.width_of(_short(lane)) for lane in story.lanes), default=0) + _AROUND
    return max(_LABEL, whole if whole <= width // _LABEL_PART else min(short, width // _LABEL_PART))


def _beside(lines: list[Line], named: int) -> list[Line]:
    """Return the lines with labels widened to `named` columns."""
    return [[_label(label, style, named), *row] for (label, style), *row in lines]


def _below(lane: Lane, named: int) -> str:
    """Return the text below a lane's name: its mesh coordinates, if the script has a mesh."""
    if not lane.place:
        return "  parameters"
    return f"  {lane.place if text.width_of(lane.place) + _AROUND <= named else _short(lane)}"


def _short(lane: Lane) -> str:
    return f"mesh {lane.short}" if lane.place else ""


def _row(room: int) -> list[tuple[str, str]]:
    return [(" ", PLAIN)] * room


def _put(row: list[tuple[str, str]], at: int, words_: str, style: str) -> None:
    for offset, char in enumerate(words_):
        if 0 <= at + offset < len(row):
            row[at + offset] = (char, style)


def _line(label: str, style: str, row: list[tuple[str, str]], named: int = _LABEL) -> Line:
    """Return a line of a label in `named` columns and a row beside it."""
    line: Line = [_label(label, style, named)]
    for char, look in row:
        if line[-1][1] == look and len(line) > 1:
            line[-1] = (line[-1][0] + char, look)
        else:
            line.append((char, look))
    return line


def _label(label: str, style: str, named: int) -> tuple[str, str]:
    shown = text.plain(text.cut([(label.rstrip(), style)], named - 1))
    return shown + " " * (named - text.width_of(shown)), style


def _controller(story: Story, to: Scale, room: int) -> Line:
    row = _row(room)
    heard, went_on = round(to.at(story.detected)), round(to.at(story.resumed))
    _put(row, heard, "─" * max(1, went_on - heard), text.CONTROL)
    name = "( Controller )"
    if went_on - heard >= len(name):
        _put(row, heard + (went_on - heard - len(name)) // 2, name, text.CONTROL)
    else:
        _put(row, max(0, min(room - len(name), heard)), name, text.CONTROL)
    return _line("Controller", text.CONTROL, row)


def _barrier_names(story: Story, to: Scale, room: int) -> Line:
    row = _row(room)
    wide, narrow = "Gradient Synchronization Barrier", "Barrier"
    free = 0
    for _, at in story.barriers:
        place = round(to.at(at))
        name = (
            f"{wide} ┐" if place - len(wide) - 2 >= free else f"{narrow} ┐" if place - len(narrow) - 2 >= free else "┐"
        )
        _put(row, place - len(name) + 1, name, text.BARRIER)
        free = place + 1
    return _line("", PLAIN, row)


def _bands(story: Story, to: Scale, room: int) -> Line:
    row = _row(room)
    for kind, since, until in model.bands(story):
        fill, style = _BANDS[kind]
        begin, end = round(to.at(since)), max(round(to.at(since)) + 1, round(to.at(until)))
        name = f" {kind} " if len(kind) + 4 <= end - begin else ""
        _put(row, begin, name.center(end - begin, fill) if name else fill * (end - begin), style)
    for _, at in story.barriers:
        _put(row, round(to.at(at)), "┃", text.BARRIER)
    return _line("all ranks", QUIET, row)


def _lane(story: Story, lane: Lane, to: Scale, room: int, named: int) -> list[Line]:
    row, squares = _row(room), _row(room)
    for bar in lane.bars:
        _bar(row, bar, to, model.done_again(bar, story))
    for _, at in story.barriers:
        if any(b.kind == model.OPTIMIZER for b in lane.bars) or lane.role == model.HEALTHY:
            _put(row, round(to.at(at)), "┃", text.BARRIER)
    if lane.fails is not None:
        at = round(to.at(lane.fails))
        _put(row, at, f"{_BOLT} Failure", BAD)
    label = {model.HEALTHY: f"{lane.label} healthy", model.FAILED: f"{lane.label} FAILED"}.get(lane.role, lane.label)
    style = {model.HEALTHY: GOOD, model.FAILED: BAD}.get(lane.role, text.DONE)
    if lane.role in (model.SPARE, model.NEW):
        label = f"{lane.label} → {lane.rank}"
    _parameters(story, lane, to, squares)
    return [_line(label, style, row, named), _line(_below(lane, named), QUIET, squares, named)]


def _bar(row: list[tuple[str, str]], bar: Bar, to: Scale, again: bool) -> None:
    fill, style, label = _LOOK[bar.kind]
    begin, end = round(to.at(bar.begin)), round(to.at(bar.end))
    length = max(1, end - begin)
    if bar.kind == model.FORWARD and len(label) + 5 <= length:
        label = f"{label} {bar.step}"
    if again and len(label) + len(_AGAIN) + 3 <= length:
        label = f"{label} {_AGAIN}"
    shown = f"{fill}{label}{fill}" if len(label) + 2 <= length else ""
    _put(row, begin, shown.center(length, fill) if shown else fill * length, style)


def _parameters(story: Story, lane: Lane, to: Scale, row: list[tuple[str, str]]) -> None:
    """Draw the squares of figures 002 and 003: at the step's start, in the optimizer step, at the failure, at the resumption."""
    for bar in lane.updates():
        begin, end = round(to.at(bar.begin)), round(to.at(bar.end))
        for at in range(begin, end):
            share = (at + 1 - begin) / (end - begin) * (0.5 if bar.broken else 1.0)
            _put(row, at, _TURNING[min(2, int(share * 3))], text.DONE if share > 0.5 else text.BACKWARD)
    for held in model.held(lane, story):
        place, number = held.place(lambda time: round(to.at(time)), 1, 1)
        at, full = round(place), round(held.share * number)
        _put(row, at, "■" * full, text.DONE)
        _put(row, at + full, "□" * (number - full), text.BACKWARD)


def _axis(story: Story, to: Scale, room: int) -> list[Line]:
    line, names = _row(room), _row(room)
    _put(line, 0, "─" * room, QUIET)
    for moment in (0.0, story.resumed):  # the scale changes there
        _put(line, min(room - 2, round(to.at(moment))) + 1, "//", QUIET)
    free = room
    for moment, name in reversed([*story.moments, (story.done, "done")]):
        at = min(room - 1, round(to.at(moment)))
        _put(line, at, "┴", QUIET)
        label = f"{name} {moment:+.0f} ms" if moment else name
        place = max(0, min(at, free - len(label)))
        _put(names, place, label[: max(0, free - place)], QUIET)
        free = place - 1
    return [_line("", PLAIN, line), _line("(own scale each)", QUIET, names)]


def _legend(story: Story, width: int) -> list[Line]:
    """Return a legend of the kinds of bars in this drawing, on as many lines as it needs."""
    drawn = {bar.kind for lane in story.lanes for bar in lane.bars}
    entries: list[Line] = []
    for kind in (*model.TRAINING, *model.REPAIR):
        if kind in drawn:
            fill, style, label = _LOOK[kind]
            entries.append([(fill * 2, style), (f" {label}  ", QUIET)])
    entries.append([("■", text.DONE), (" parameters updated  ", QUIET)])
    entries.append([("□", text.BACKWARD), (" not updated", QUIET)])
    lines: list[Line] = [[(" " * _LABEL, PLAIN)]]
    for entry in entries:
        if sum(text.width_of(said) for said, _ in [*lines[-1], *entry]) > width + 2:
            lines.append([(" " * _LABEL, PLAIN)])
        lines[-1] += entry
    return lines


# -- the transfer --------------------------------------------------------------------------------------------------------

_GAP = 4  # columns of an interval in which nothing moves
_STAGES = {
    transfer.H2D: ("░", PLAIN),
    transfer.SRC: ("▒", WARN),
    transfer.RELOAD: ("█", text.CONTROL),
    transfer.DST: ("▓", text.FORWARD),
}
_DOES = {
    transfer.H2D: "its share, from the host",
    transfer.SRC: "sent to all",
    transfer.RELOAD: "into its weights",
    transfer.DST: "taken from another rank",
}


def moved(what: Transfer, width: int) -> list[Line]:
    """Draw figure 004: a row for each thread that moved bytes, on one scale from the first byte to the last."""
    room, length = width - _LABEL, max(what.end - what.begin, 1e-9)
    lines: list[Line] = [[(f"how the bytes moved, in {milliseconds(length)} ms", HEAD)]]
    to = what.scale(room - 1, _GAP)
    for buffer, pieces in what.buffers():
        lines.append(_line(buffer, PLAIN, _moves(to, [piece for _, piece in pieces], room)))
    before = -1
    for row in what.rows:
        cells = _moves(to, row.pieces, room)
        name = f"rank {row.rank}" if row.rank != before else ""
        lines.append(_line(f"{name:<9}{'sends' if row.sends else 'takes'}", PLAIN, cells))
        before = row.rank
    if what.ranks > len({row.rank for row in what.rows}):
        lines.append([(f"and {count(what.ranks - len({row.rank for row in what.rows}), 'more rank')}", QUIET)])
    axis, ends = _row(room), (f"{what.begin:+.1f} ms", f"{what.end:+.1f} ms")
    _put(axis, 0, "─" * room, QUIET)
    for begin, end in what.idle():
        _put(axis, max(0, int((to.at(begin) + to.at(end)) / 2)), "//", QUIET)
    lines.append(_line("(idle time cut)" if what.idle() else "", QUIET, axis))
    lines.append([(" " * _LABEL + ends[0] + ends[1].rjust(room - len(ends[0])), QUIET)])
    for kind in what.kinds():
        fill, style = _STAGES[kind]
        lines.append([(" " * _LABEL, PLAIN), (fill * 2, style), (f" {kind}: {_DOES[kind]}", QUIET)])
    return [text.cut(line, width) for line in lines]


def _moves(to: Scale, pieces: Iterable[TransferPiece], room: int) -> list[tuple[str, str]]:
    cells = _row(room)
    for piece in pieces:
        fill, style = _STAGES[piece.kind]
        begin, end = int(to.at(piece.begin)), int(to.at(piece.end))
        _put(cells, begin, fill * max(1, end - begin), style)
    return cells


# -- where the time went -------------------------------------------------------------------------------------------------

_NAMES = {
    "detect": "noticing the failure",
    "stop": "healthy ranks leave the step",
    "clean": "they drop what was half done",
    "reset": "connections are made again",
    "restore": "the new worker gets the state",
    "resume": "all begin the step",
    "first_step": "the step itself",
}


def where(story: Story, width: int) -> list[Line]:
    """Draw a row for each part of the incident, as long as its share of the time."""
    lines: list[Line] = [[(f"where the {story.done:.0f} ms went", HEAD)]]
    room = max(8, width - 60)
    for name, value in story.parts.items():
        length = round(min(1.0, value / story.done) * room) if story.done else 0
        style = text.FORWARD if name == "first_step" else WARN
        bar = "█" * length or "▏"
        gap = " " * (room - len(bar)) + "  "
        label, said = name.replace("_", " "), _NAMES[name]
        if name == "first_step" and not story.going_on.in_step:
            label, said = "go on", story.going_on.what()
        parts = [(f"  {label:<11}", STRONG), (f"{milliseconds(value):>8} ms  ", PLAIN)]
        lines.append([*parts, (bar, style), (gap + said, QUIET)])
    moved = sum(int(s["bytes"]) for s in story.sources.values())
    if moved:
        lines.append([(f"  {size(moved)} of state were moved", QUIET)])
    return [text.cut(line, width) for line in lines]
