"""Lay out the screen of `ftrun status`: a picture (see snapshot) as styled lines. Words and layout only."""

from __future__ import annotations

import time
from typing import Any

from ftrun.core.account import PARTS
from ftrun.core.amounts import count, milliseconds, size
from ftrun.core.shared import mesh
from ftrun.core.shared.moment import CALL_AFTER, LOOP_END, Moment
from ftrun.view import text
from ftrun.view.status import sentences
from ftrun.view.status.header import header, troubles
from ftrun.view.status.nodes import nodes
from ftrun.view.status.sentences import cause
from ftrun.view.text import BAD, CHOSEN, CULPRIT, HEAD, PLAIN, QUIET, STRONG, WARN, Column, Line, Span

WIDTH_LEAST = 40
_PHASE_STYLE = {"forward": text.FORWARD, "backward": text.BACKWARD, "update": text.UPDATE, "gate": text.BARRIER}
_CULPRIT = "the others wait for it"
_NOTES = {  # for reasons that no other column shows
    "no sign of life": "no sign of life",
    "not in step with most": "out of step",
    "not where most wait": "not where most wait",
    _CULPRIT: "all wait for it",
}
_SLOW_BEAT = 2.0  # seconds
_LONG_WAIT = 5.0
_WIDE, _BAR = 130, 30  # least screen width with bars; width of the longest bar

_COLUMNS = (
    Column("rank", 99, right=True),
    Column("mesh", 53, most=32),
    Column("device", 60, right=True),
    Column("pid", 55, right=True),
    Column("phase", 95, least=8),
    Column("step", 98, right=True, least=6),
    Column("beat", 80, right=True, least=6),
    Column("waits for", 90, most=28, least=22),
    Column("own work", 48),
    Column("memory", 50, right=True),
    Column("util", 45, right=True),
    Column("temp", 40, right=True),
    Column("note", 85),
)


def screen(picture: dict[str, Any], width: int, selected: int | None = None, chart: int = 0) -> list[Line]:
    """Return all lines of the snapshot.

    `selected`: index of the incident that the keyboard marks. `chart`: lines for the chart of step times, 0 = one line.
    """
    width = max(width, WIDTH_LEAST)
    lines = [*header(picture, width, chart), *troubles(picture, width), [], *nodes(picture, width), *ranks(picture, width)]
    found = incidents(picture, width, selected)
    return [*lines, *([[], *found] if found else [])]


# -- ranks ---------------------------------------------------------------------------------------------------------------


def ranks(picture: dict[str, Any], width: int) -> list[Line]:
    """Return the table of ranks, a count by activity of the folded ranks, and the spares."""
    on = {d.get("rank"): d for d in picture["devices"] if d.get("rank") is not None}
    held = [w for w in picture["workers"] if w["rank"] is not None]
    most = max((w["work"] or 0.0 for w in held), default=0.0)
    bars = most if width >= _WIDE else 0.0
    rows = [_rank_row(w, on.get(w["rank"]), picture["protected"] is not True, bars, width >= _WIDE) for w in held]
    lines = text.table(_COLUMNS, rows, width) if rows else [[("no rank has begun yet", QUIET)]]
    folded = picture["folded"]
    if folded["ranks"]:
        doing = ", ".join(f"{number} {what}" for what, number in folded["doing"])
        lines.append(text.cut([(f"and {count(folded['ranks'], 'more rank')}: {doing}", QUIET)], width))
    spares = [w for w in picture["workers"] if w["rank"] is None]
    for worker in spares[:3]:
        told = f"  pid {worker['pid']}  {_spare(worker, picture['cwd'])}"
        lines.append(text.cut([(f"spare {worker['cell']}", STRONG), (told, QUIET)], width))
    if len(spares) > 3:
        lines.append([(f"and {count(len(spares) - 3, 'spare')} more", QUIET)])
    return lines


def _spare(worker: dict[str, Any], cwd: str) -> str:
    if worker["exit"] is not None:
        return f"ended with {worker['exit']}"
    if "parked" in worker["flags"]:
        line = worker["parked_at"] or ""
        line = line.removeprefix(f"{cwd}/") if cwd else line
        return f"ready, parked at {line}" if line else "ready"
    return "warming up"


def _rank_row(
    worker: dict[str, Any], device: dict[str, Any] | None, unprotected: bool, most_work: float, wide: bool
) -> list[Span]:
    beat, phase = worker["beat_age"], worker["phase"]
    if unprotected and phase == "start" and "script" in worker["flags"]:
        phase = "script"  # ftrun does not see inside an unprotected script
    stale = beat is not None and beat > _SLOW_BEAT
    waits, waited = "", worker["collective_age"] or 0.0
    if worker["collective"]:
        waits = f"{worker['collective']} #{worker['collective_number']} {text.duration(waited)}"
    elif phase in ("gate", LOOP_END):
        waits = "gate"
    gone = worker["exit"] is not None
    notes = [*worker["notes"]]
    if worker["stands_out"] in _NOTES:
        notes.insert(0, _NOTES[worker["stands_out"]])
    if worker["bytes"]:
        notes.append(f"{size(worker['bytes']['moved'])} of {size(worker['bytes']['total'])} restored")
    grave = gone or any(n.startswith("quarantined") for n in notes)
    row = [
        (str(worker["rank"]), STRONG),
        (_place(worker["mesh"] or {}, wide), PLAIN),
        (_device(worker), PLAIN),
        (str(worker["pid"] or ""), QUIET),
        ("gone" if gone else phase, BAD if gone else _PHASE_STYLE.get(phase, PLAIN)),
        ("" if worker["step"] is None else str(worker["step"]), PLAIN),
        ("" if beat is None else text.duration(beat), BAD if stale else QUIET),
        (waits, WARN if waited > _LONG_WAIT else PLAIN),
        (_work(worker["work"], most_work), PLAIN),
        (_memory(worker, device), PLAIN),
        (f"{device['utilisation']} %" if device and device.get("utilisation") is not None else "", PLAIN),
        (f"{device['temperature']} °C" if device and device.get("temperature") is not None else "", PLAIN),
        ("; ".join(notes), BAD if grave else WARN),
    ]
    return [(said, CULPRIT) for said, _ in row] if worker["stands_out"] == _CULPRIT else row


def _place(at: dict[str, int], wide: bool) -> str:
    """Return the mesh coordinates; the header names the dimensions in the same order."""
    return mesh.words(at) if wide else ",".join(map(str, at.values()))


def _device(worker: dict[str, Any]) -> str:
    if worker["device"] is None:
        return ""
    tail = f" …{str(worker['uuid'])[-6:]}" if worker["uuid"] else ""
    return f"{worker['device']}{tail}"


def _work(seconds: float | None, most: float) -> str:
    """Return the duration with a bar relative to the slowest rank's."""
    if seconds is None:
        return ""
    return f"{text.duration(seconds):>7}" + (f" {'■' * max(1, round(seconds / most * _BAR))}" if most else "")


def _memory(worker: dict[str, Any], device: dict[str, Any] | None) -> str:
    if device and device.get("memory_total"):
        return f"{size(device.get('memory_used') or 0)}/{size(device['memory_total'])}"
    return size(worker["memory"]) if worker["memory"] else ""


# -- incidents -----------------------------------------------------------------------------------------------------------


def incidents(picture: dict[str, Any], width: int, selected: int | None = None) -> list[Line]:
    """Return the incidents, newest first: a line for each and its outcome below."""
    found = picture["incidents"]
    if not found:
        return []
    total = picture["incidents_total"]
    lines: list[Line] = [[(f"{count(total, 'incident')}, newest first", HEAD)]]
    for at, incident in enumerate(found):
        mark = CHOSEN if at == selected else PLAIN
        when = time.strftime("%H:%M:%S", time.localtime(incident["time"]))
        what = "; ".join(cause(v) for v in incident["victims"]) or f"all waited in {incident['stuck'] or 'each other'}"
        lines.append(
            text.cut(
                [(f"{'►' if mark else ' '}#{incident['number']} {when}  ", mark or QUIET), (what, mark or BAD)], width
            )
        )
        lines += [
            [("     ", PLAIN), *line] for line in text.wrapped(outcome(incident), width - 5, mark or PLAIN)
        ]
    return lines


def outcome(incident: dict[str, Any]) -> str:
    """Return the duration, sources and cost: "212 ms: detect 0.1, ...; rank 2 adopted in place, 0 B; 1 step again"."""
    ms = incident["ms"] or {}
    if incident["restart"]:
        again = f"; {count(incident['redone'], 'step')} again" if incident["redone"] else ""
        return f"{text.duration(incident['total_ms'] / 1000)}: all workers were started anew{again}"
    then = Moment.told(incident.get("going_on") or {})
    named = {"first_step": then.part}
    parts = ", ".join(f"{named.get(name, name)} {milliseconds(ms[name])}" for name in PARTS if name in ms)
    sources = [
        f"rank {rank} {_source(s)}" for rank, s in (incident["sources"] or {}).items() if _replaced(incident, rank)
    ]
    again = "job.call again" if then.phase == CALL_AFTER else f"{count(incident['redone'], 'step')} again"
    return "; ".join([f"{incident['total_ms']:.0f} ms: {parts}", *sources, again])


def _replaced(incident: dict[str, Any], rank: str) -> bool:
    return any(str(v["rank"]) == rank for v in incident["victims"])


def _source(source: dict[str, Any]) -> str:
    return f"{sentences.source(source['name'])}, {size(source['bytes'])}"
