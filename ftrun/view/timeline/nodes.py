"""Draw what an incident of several nodes was on each of them: a row of stages for each node, below the drawing of this node.

Each row has a clock of its own: from the failure on the node of a failed rank, on the others from when they heard of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftrun.core.account import PARTS
from ftrun.core.amounts import milliseconds
from ftrun.view import text
from ftrun.view.status.sentences import cause, source
from ftrun.view.text import BAD, HEAD, PLAIN, QUIET, STRONG, WARN, Line

_LABEL = 17  # columns for the nodes' names
_LOOK = {
    "detect": ("·", QUIET),
    "stop": ("▚", BAD),
    "clean": ("▞", BAD),
    "reset": ("█", BAD),
    "restore": ("▓", text.DONE),
    "resume": ("═", text.DONE),
    "first_step": ("░", text.FORWARD),
}


def rows(incident: Sequence[dict[str, Any]], width: int) -> list[Line]:
    """Return a title, and two lines for each node: its stages drawn to one scale, and in words. `incident`: notes "node-incident"."""
    found = sorted(incident, key=lambda note: int(note["node"]))
    room = max(20, width - _LABEL)
    longest = max((sum(note["ms"].values()) for note in found), default=0.0) or 1.0
    drawn = [part for part in PARTS if any(note["ms"].get(part) for note in found)]
    lines: list[Line] = [[("on each node, from the failure, or from when it heard of it", HEAD)]]
    for note in found:
        line: Line = [(_name(note).ljust(_LABEL)[:_LABEL], BAD if note["victims"] else STRONG)]
        for part in drawn:
            fill, style = _LOOK[part]
            line.append((fill * round(note["ms"].get(part, 0.0) / longest * room), style))
        lines += [line, *([(" " * _LABEL, PLAIN), *said] for said in text.wrapped(sentence(note), room, QUIET))]
    legend: Line = [(" " * _LABEL, PLAIN)]
    for part in drawn:
        legend += [(_LOOK[part][0] * 2, _LOOK[part][1]), (f" {part.replace('_', ' ')}  ", QUIET)]
    return [text.cut(line, width) for line in [*lines, legend]]


def title(incident: Sequence[dict[str, Any]], run: str) -> list[Line]:
    """Return the lines above the rows for an incident in which no rank of this node failed."""
    victims = [victim for note in incident for victim in note["victims"]]
    who = "; ".join(cause(victim) for victim in victims) or "a node was replaced, or its account has not come here"
    return [
        [(f"an incident of run {run} in which no rank of this node failed", HEAD)],
        [("what failed      ", QUIET), (who, WARN)],
        [],
    ]


def sentence(note: dict[str, Any]) -> str:
    """Return the victims, the stages and the sources of one node's part: "SIGKILL → rank 2 in backward of step 6; 120 ms: stop 2, ..."."""
    parts = ", ".join(f"{part.replace('_', ' ')} {milliseconds(note['ms'][part])}" for part in PARTS if note["ms"].get(part))
    who = [cause(victim) for victim in note["victims"]]
    sources = [f"rank {rank} {source(name)}" for rank, name in note["sources"].items()]
    return "; ".join([*who, f"{note['total_ms']:.0f} ms" + (f": {parts}" if parts else ""), *sources])


def _name(note: dict[str, Any]) -> str:
    return f"node {note['node']} {'(here)' if note['here'] else note['host']}"
