"""Lay out the nodes of a run in `ftrun status`, one line for each. Words and layout only."""

from __future__ import annotations

from typing import Any

from ftrun.core.amounts import count
from ftrun.core.text import ranks as named
from ftrun.view import text
from ftrun.view.state import LEFT, LOST, SPARE
from ftrun.view.status import sentences
from ftrun.view.status.header import STATE_STYLE
from ftrun.view.text import BAD, HEAD, PLAIN, QUIET, STRONG, WARN, Column, Line, Span

_COLUMNS = (
    Column("node", 99, right=True),
    Column("host", 90, most=24),
    Column("ranks", 85),
    Column("state", 98),
    Column("step", 95, right=True),
    Column("healthy", 94, right=True),
    Column("spares", 60, right=True),
    Column("replaced", 50, right=True),
    Column("note", 92, most=120),
)


def nodes(picture: dict[str, Any], width: int) -> list[Line]:
    """Return a title and the table of nodes, and a blank line; nothing for a run on one node."""
    found = picture["nodes"]
    if not found:
        return []
    members = [entry for entry in found if entry["node"] is not None]
    waiting = len(found) - len(members)
    ranks = sum(entry["nproc"] for entry in members)
    healthy = sum(entry["healthy"] or 0 for entry in members)
    title = f"{count(len(members), 'node')}" + (f" and {count(waiting, 'spare node')}" if waiting else "")
    rows = [_row(entry) for entry in found]
    return [[(f"{title}, {healthy}/{ranks} ranks healthy", HEAD)], *text.table(_COLUMNS, rows, width), []]


def _row(entry: dict[str, Any]) -> list[Span]:
    state = entry["state"]
    gone = state in (LOST, LEFT)
    ranks = "" if entry["ranks"] is None else "{} to {}".format(*entry["ranks"]) if entry["nproc"] > 1 else str(entry["ranks"][0])
    well = entry["healthy"]
    known = well is not None and not gone
    ready, wanted = entry["spares_ready"], entry["spares_wanted"]
    return [
        ("" if entry["node"] is None else str(entry["node"]), STRONG),
        (entry["host"], PLAIN),
        (ranks, PLAIN),
        (state, BAD if gone else STATE_STYLE.get(state, PLAIN)),
        (str(entry["step"]) if known else "", PLAIN),
        (f"{well}/{entry['nproc']}" if known else "", PLAIN if well == entry["nproc"] else BAD),
        (f"{ready}/{wanted}" if known and wanted else "", PLAIN if not wanted or ready >= wanted else WARN),
        (str(entry["replacements"]) if known and entry["replacements"] else "", PLAIN),
        ("; ".join(_notes(entry)), QUIET if entry["here"] and not entry["silent"] else WARN),
    ]


def _notes(entry: dict[str, Any]) -> list[str]:
    notes = ["this node"] if entry["here"] else []
    if entry["silent"]:
        notes.append(f"nothing heard of it for {entry['silent']} s")
    if entry["state"] == SPARE:
        return [*notes, "waits for a place"]
    if entry["state"] == "recovering" and entry["machine"] is not None:
        notes.append(entry["machine"].replace("_", " ").lower())
    if entry["unwell"]:
        notes.append(f"{named(entry['unwell'])} not healthy")
    if entry["stall"] and not entry["here"]:
        notes.append(f"stalled {sentences.stall(entry['stall'])}")
    return notes
