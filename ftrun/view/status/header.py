"""Lay out the lines above the ranks in `ftrun status`: the run, its pace, its troubles. Words and layout only."""

from __future__ import annotations

import os
import shlex
import statistics
from typing import Any

from ftrun.core.amounts import count, size
from ftrun.core.shared import mesh
from ftrun.core.shared.left_out import shown
from ftrun.view import text
from ftrun.view.status import sentences
from ftrun.view.text import BAD, GOOD, PLAIN, QUIET, STRONG, WARN, Line

STATE_STYLE = {
    **dict.fromkeys(("starting", "recovering", "degraded", "stalled", "unprotected"), WARN),
    "healthy": GOOD,
    **dict.fromkeys(("ended", "spare", "finished"), QUIET),
}
_LATE = 3.0  # typical steps without a gate after which the current step gets its own bar
_TALLEST = 2.0  # height of the chart in typical steps: a taller bar would flatten all others
_LABEL = 10  # columns of the chart's scale
BRIEF, CHART_LEAST, CHART_MOST = -1, 5, 12  # lines of the chart of step times, with its title


def header(picture: dict[str, Any], width: int, chart: int = 0) -> list[Line]:
    """Return the lines on the run's identity, progress and pace.

    `chart`: lines for the chart of step times; fewer than CHART_LEAST = one line; BRIEF = no chart and the essentials only.
    """
    script = [] if chart == BRIEF else [_script(picture, width)]
    over = [] if chart == BRIEF else [*_mesh(picture), *_kept(picture)]
    lines = [*_flow(_identity(picture), width), *script, *_flow([*_progress(picture), *over], width)]
    if chart != BRIEF:
        lines += _pace(picture, width, chart)
    if picture["inexact"] or picture["restarts"]:
        why = (
            ", ".join(w.replace("_", " ") for w in picture["inexact"])
            or f"{count(picture['restarts'], 'restart')} of the script"
        )
        lines.append(text.cut([("the result will not be known to be bit-identical: ", WARN), (why, WARN)], width))
    elif picture["left_out"] and picture["incidents"]:
        why = shown(picture["left_out"])
        lines.append(text.cut([("repaired, with what protect() was given only; not ", WARN), (why, WARN)], width))
    return lines


def _identity(picture: dict[str, Any]) -> list[Line]:
    state = picture["state"]
    return [
        [("run ", QUIET), (picture["run"], STRONG)],
        [(state, STATE_STYLE[state]), (f" ({picture['machine']})", QUIET)],
        [("generation ", QUIET), (str(picture["generation"]), PLAIN)],
        [("up ", QUIET), (text.duration(picture["seconds"]), PLAIN)],
        [("on ", QUIET), (picture["host"], PLAIN)],
    ]


def _script(picture: dict[str, Any], width: int) -> Line:
    """Return the command line and its log folder; the end of a long command line is cut, never the folder."""
    command = shlex.join(picture["argv"])
    logs = picture["log_dir"]
    if picture["cwd"] and logs.startswith(picture["cwd"] + os.sep):
        logs = os.path.relpath(logs, picture["cwd"])
    room = max(12, width - text.width_of(logs) - 8) if logs else width
    return text.cut([*text.cut([(command, PLAIN)], room), *([("   logs ", QUIET), (logs, PLAIN)] if logs else [])], width)


def _progress(picture: dict[str, Any]) -> list[Line]:
    rate, effective, steps = picture["steps_per_second"], picture["effective_training_time"], picture["steps"]
    parts: list[Line] = []
    if picture["epoch"] is not None:
        parts.append([("epoch ", QUIET), (str(picture["epoch"]), STRONG)])
    if picture["protected"]:
        parts.append([("step ", QUIET), (str(picture["step"]), STRONG), (f" of {steps}" if steps else "", QUIET)])
    if rate is not None:
        parts.append([(f"{rate:.3g} steps/s", WARN if picture["stall"] else PLAIN)])
    if picture["seconds_left"] is not None:
        what = "epoch ends in " if picture["epoch"] is not None else "ETA "
        parts.append([(what, QUIET), (text.duration(picture["seconds_left"]), PLAIN)])
    if effective is not None:
        parts.append([("effective training time ", QUIET), (f"{effective * 100:.1f} %", PLAIN)])
    whole = picture["healthy"] == picture["world_size"]
    parts.append([(f"{picture['healthy']}/{picture['world_size']} ranks healthy", GOOD if whole else BAD)])
    spares = f"{picture['spares_ready']}/{picture['spares_wanted']} spares ready"
    parts.append([(spares, PLAIN if picture["spares_ready"] >= picture["spares_wanted"] else WARN)])
    return parts


def _mesh(picture: dict[str, Any]) -> list[Line]:
    return [[("mesh ", QUIET), (mesh.shape(picture["mesh"]), PLAIN)]] if picture["mesh"] else []


def _kept(picture: dict[str, Any]) -> list[Line]:
    """Return the number of the script's values that are kept; `ftrun explain RUN` names them."""
    told, others = picture["kept"], len(picture["not_kept"])
    number = sum(len(value["names"]) for value in told["values"]) if told else 0
    if not number and not others:
        return []
    return [[("kept ", QUIET), (count(number, "value"), PLAIN), *([(f", {others} not", WARN)] if others else [])]]


def _pace(picture: dict[str, Any], width: int, chart: int) -> list[Line]:
    """Return a bar for each of the newest steps, and a growing bar for a late step."""
    times, age = picture["step_times"], picture["step_age"]
    if not times or age is None or not picture["protected"]:
        return []
    typical = statistics.median(times)
    late = age > max(1.0, _LATE * typical)
    said = f"  {text.duration(typical)} (fastest {text.duration(min(times))}, slowest {text.duration(max(times))})"
    waits = f"  none for {text.duration(age)}" if late else ""
    if chart >= CHART_LEAST:
        title: Line = [("step time", QUIET), (said, PLAIN), (waits, WARN)]
        return [text.cut(title, width), *_chart(times, age if late else None, typical, width, min(chart, CHART_MOST) - 1)]
    room = width - len("step time ") - len(said) - len(waits) - late
    bars = text.spark(times[-max(8, room) :], _TALLEST * typical)
    line: Line = [("step time ", QUIET), (bars, text.FORWARD)]
    if late:
        line.append((text.spark([age], _TALLEST * typical), WARN))
    return [text.cut([*line, (said, PLAIN), (waits, WARN)], width)]


def _chart(times: list[float], late: float | None, typical: float, width: int, rows: int) -> list[Line]:
    """Draw the step times over several lines. `late`: seconds of the current step if it is late, else None."""
    top = max(min(max(times), 3 * typical), _TALLEST * typical)
    shown = text.chart(times[-(width - _LABEL - 2) :], top, rows)
    last = text.chart([] if late is None else [late], top, rows)
    lines: list[Line] = []
    for row, (bars, end) in enumerate(zip(shown, last, strict=True)):
        label = text.duration(top) if not row else "0" if row == rows - 1 else ""
        lines.append([(f"{label:>{_LABEL - 1}} ", QUIET), (bars, text.FORWARD), (end, WARN)])
    return lines


def _flow(parts: list[Line], width: int) -> list[Line]:
    """Lay parts out side by side, on as many lines as they need."""
    lines: list[Line] = [[]]
    room = width
    for part in parts:
        wide = sum(text.width_of(t) for t, _ in part)
        if lines[-1] and wide + 3 > room:
            lines.append([])
            room = width
        if lines[-1]:
            lines[-1].append(("   ", PLAIN))
            room -= 3
        lines[-1] += part
        room -= wide
    return [text.cut(line, width) for line in lines]


# -- troubles ------------------------------------------------------------------------------------------------------------


def troubles(picture: dict[str, Any], width: int) -> list[Line]:
    """Return the lines on the current incident, a stall, a stopped launcher and a missing protection."""
    lines = _current(picture, width)
    if picture["stall"] is not None:
        lines += text.wrapped(f"stalled {sentences.stall(picture['stall'])}", width, WARN)
    if picture["launcher"] == "stopped" and picture["state"] != "ended":
        lines += text.wrapped(sentences.launcher_stopped(picture["pid"]), width, BAD)
    if picture["state"] == "unprotected":
        lines += text.wrapped(sentences.unprotected(picture["restarts_left"], picture["trained"]), width, WARN)
    return lines


def _current(picture: dict[str, Any], width: int) -> list[Line]:
    current = picture["current"]
    if current is None:
        return []
    phase = current["phase"].replace("_", " ").lower()
    why = "; ".join(sentences.cause(v) for v in current["victims"][:3]) or current["said"]
    lines = [
        text.cut(
            [(f"recovering: {phase}", WARN), (f" for {text.duration(current['seconds'])}  ", PLAIN), (why, BAD)], width
        )
    ]
    if current["bytes"]:
        done, total = current["bytes"]["moved"], current["bytes"]["total"]
        label = f" {size(done)} of {size(total)} restored"
        lines.append([*text.bar(done / total if total else 0, max(10, min(40, width - len(label)))), (label, PLAIN)])
    return lines
