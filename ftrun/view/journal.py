"""Fold a journal into the history of its run: account, configuration, mesh, kept values. The journal is the only source."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ftrun.core.account import Account, Fact
from ftrun.core.journal import whole
from ftrun.view import records


def parse(line: bytes) -> dict[str, Any] | None:
    """Parse one line; None if it is damaged or does not fit the form in `records`."""
    raw = whole(line)
    return raw if raw is not None and records.fits(raw) else None


class History:
    """The history of a run up to the newest line. `add` takes the lines in order, and skips cheaply over those without news."""

    def __init__(self) -> None:
        self.account = Account()
        self.config: dict[str, Any] = {}
        self.latest = 0.0  # time of the newest line, monotonic
        self.mesh: dict[str, int] = {}  # sizes of the dimensions of the script's mesh, by name
        self.places: dict[str, dict[str, int]] = {}  # rank -> its mesh coordinates
        self.newest_is_elsewhere = False  # did no rank of this node fail in the newest incident?
        self.kept: dict[str, Any] = {"not_kept": {}}  # the newest note on the script's values
        self.nodes: dict[tuple[int, int], list[dict[str, Any]]] = {}  # (round, number) of an incident -> what it was on each node
        self.summary: dict[str, Any] | None = None
        self.unread = 0  # lines that are damaged, or from another version
        self._quiet = b""  # the end of an answer that changed nothing

    def add(self, line: bytes) -> None:
        """Add one line of the journal; count and skip a damaged one, or one from another version that lacks needed fields."""
        if line.startswith(b'"event": {"kind": "Stage"', line.find(b'"event"')):
            return
        answer = line.find(b'"actions": [], ')
        if answer >= 0 and line[answer:] == self._quiet:
            return
        raw = parse(line)
        if raw is None:
            self.unread += 1
            return
        self.latest = float(raw.get("t", self.latest))
        if "event" in raw:
            self.fold(raw["event"]["kind"], raw["event"])
        elif "phase" in raw:
            self._quiet = line[answer:] if answer >= 0 else self._quiet
            for action in raw.get("actions", ()):
                self.fold(action["kind"], action)
            self.fold("phase", raw)
        elif "note" in raw:
            self._note(raw)
        elif "config" in raw:
            self.config = raw["config"]
            self.fold("config", raw)

    def on_nodes(self, own: int | None) -> list[dict[str, Any]]:
        """Return what incident `own` of this journal (from 1) was on each node; None: the newest one in which no rank of this node failed.

        Empty in a run on one node.
        """
        found = list(self.nodes.values())
        if own is not None:
            return next((notes for notes in found if any(note["own"] == own for note in notes)), [])
        return next((notes for notes in reversed(found) if all(note["own"] is None for note in notes)), [])

    def add_all(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.add(line)

    def fold(self, kind: str, facts: dict[str, Any]) -> None:
        """Add a fact to the account, at the time of the newest line."""
        self.account = self.account.then(Fact(self.latest, kind, facts))

    def _note(self, raw: dict[str, Any]) -> None:
        note = raw["note"]
        if note in ("incident", "stall", "fault"):
            self.fold(note, raw)
            self.newest_is_elsewhere = self.newest_is_elsewhere and note != "incident"
        elif note == "mesh":
            self.mesh, self.places = raw["dims"], raw["ranks"]
        elif note == "node-incident":
            key = raw["round"], raw["number"]
            self.nodes.setdefault(key, []).append(raw)
            if key == max(self.nodes):
                self.newest_is_elsewhere = all(one["own"] is None for one in self.nodes[key])
        elif note == "kept":
            self.kept = raw
        elif note == "summary":
            self.summary = raw
