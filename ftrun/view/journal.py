"""What a journal says: the account of its run, and what its script is. What is not in the journal is not shown as a fact."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ftrun.core.account import Account, Fact
from ftrun.core.journal import whole
from ftrun.view import records


def parse(line: bytes) -> dict[str, Any] | None:
    """One line whose fields are those of `records`; None when it is damaged, or unlike those of this version."""
    raw = whole(line)
    return raw if raw is not None and records.fits(raw) else None


class History:
    """What a journal says so far. Feed it with `add` in order; cheap for lines that change nothing."""

    def __init__(self) -> None:
        self.account = Account()
        self.config: dict[str, Any] = {}
        self.latest = 0.0  # time of the newest line, monotonic
        self.mesh: dict[str, int] = {}  # sizes of the dimensions of the script's mesh, by name
        self.places: dict[str, dict[str, int]] = {}  # rank -> where it is on it
        self.kept: dict[str, Any] = {"not_kept": {}}  # what was told last of the script's values
        self.summary: dict[str, Any] | None = None
        self.unread = 0  # lines that are damaged, or not as this version writes them
        self._quiet = b""  # the end of an answer that changed nothing

    def add(self, line: bytes) -> None:
        """One line of the journal. A damaged one, or one of another version that lacks what we look for, is passed over."""
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

    def add_all(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.add(line)

    def fold(self, kind: str, facts: dict[str, Any]) -> None:
        """One more fact for the account, as of the newest line."""
        self.account = self.account.then(Fact(self.latest, kind, facts))

    def _note(self, raw: dict[str, Any]) -> None:
        note = raw["note"]
        if note in ("incident", "stall", "fault"):
            self.fold(note, raw)
        elif note == "mesh":
            self.mesh, self.places = raw["dims"], raw["ranks"]
        elif note == "kept":
            self.kept = raw
        elif note == "summary":
            self.summary = raw
