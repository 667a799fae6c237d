"""The account that follows from a journal: phases, incidents, time lost. What is not in the journal is not shown as a fact."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ftrun.control.phases import INTERRUPTED, OVER, RunPhase
from ftrun.core.journal import whole
from ftrun.view import records


def parse(line: bytes) -> dict[str, Any] | None:
    """One line whose fields are those of `records`; None when it is damaged, or unlike those of this version."""
    raw = whole(line)
    return raw if raw is not None and records.fits(raw) else None


class Account:
    """What a journal says so far. Feed it with `add` in order; cheap for lines that change nothing."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.began = 0.0  # monotonic seconds
        self.wall = 0.0  # unix seconds at `began`
        self.latest = 0.0  # time of the newest line, monotonic
        self.phase = str(RunPhase.NEW)
        self.generation = 0
        self.holders: dict[int, int] = {}
        self.training: float | None = None  # when the first step could begin, monotonic
        self.since: float | None = None  # when the incident that goes on began, monotonic
        self.incidents: list[dict[str, Any]] = []
        self.restarts = 0
        self.faults: list[dict[str, Any]] = []
        self.mesh: dict[str, int] = {}  # sizes of the dimensions of the script's mesh, by name
        self.places: dict[str, dict[str, int]] = {}  # rank -> where it is on it
        self.kept: dict[str, Any] = {"not_kept": {}}  # what was told last of the script's values
        self.summary: dict[str, Any] | None = None
        self.exit_code: int | None = None
        self.unread = 0  # lines that are damaged, or not as this version writes them
        self.ended: float | None = None
        self.stalled = 0.0  # seconds of all standstills that are over
        self._stall = (0.0, 0.0)  # when the newest of them began and ended
        self.stalled_since: float | None = None  # of the one that goes on; the board has it, not the journal
        self._protected: set[int] = set()
        self._took_over: set[int] = set()  # cells that were given a dead worker's rank
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
            self._event(raw["event"])
        elif "phase" in raw:
            self._quiet = line[answer:] if answer >= 0 else self._quiet
            self._answer(raw)
        elif "note" in raw:
            self._note(raw)
        elif "config" in raw:
            self.config = raw["config"]
            self.began, self.wall = self.latest, float(raw.get("wall", 0.0))

    def add_all(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.add(line)

    # -- figures that are always asked for ---------------------------------------------------------------------------

    @property
    def replacements(self) -> int:
        return len(self._took_over)

    def lost(self, now: float) -> float:
        """Seconds spent on incidents, on steps done again and in standstills, with what goes on; `now` is monotonic."""
        begun = self.since if self.since is not None else self.stalled_since
        going = self.stalled + (0.0 if begun is None else now - begun)
        lost: float = sum(i["total_ms"] + i.get("again_ms", 0.0) for i in self.incidents) / 1000
        return lost + max(0.0, going)

    def effective(self, now: float) -> float | None:
        """Effective training time ratio: the part of the run's time in which it trained: not starting, standing still or
        being repaired. None before training began."""
        end = self.ended if self.ended is not None else now
        if self.training is None or end <= self.began:
            return None
        return max(0.0, min(1.0, (end - self.training - self.lost(end)) / (end - self.began)))

    # -- what a line changes -----------------------------------------------------------------------------------------

    def _event(self, event: dict[str, Any]) -> None:
        kind = event.get("kind")
        if kind == "Protected":
            self._protected.add(event["worker"])
            if self.generation == 1 and self._protected.issuperset(self.holders.values()):
                self.training = self.latest
        elif kind in ("Died", "Raised"):
            if event.get("worker") in self.holders.values() and self.phase not in OVER:
                self._open()

    def _open(self) -> None:
        self.since = self.latest if self.since is None else self.since

    def _answer(self, raw: dict[str, Any]) -> None:
        phase, self.generation = raw["phase"], raw["generation"]
        for action in raw.get("actions", ()):
            self._action(action)
        if phase == self.phase:
            return
        self.phase = phase
        if phase in INTERRUPTED:
            self._open()
        elif phase in OVER:
            self.since = None
        if phase == RunPhase.RUNNING and self.training is None:
            self.training = self.latest  # later when the script protects its state

    def _action(self, action: dict[str, Any]) -> None:
        kind = action.get("kind")
        if kind == "Publish":
            self.holders = dict(enumerate(action["workers"]))
            self._took_over.update(action["workers"][rank] for rank in action["replaced"])
            self.restarts += bool(action.get("fresh") and action.get("attempt"))
        elif kind == "Say" and action.get("what") in ("stuck", "restarting", "world_stopped", "peer_failed"):
            self._open()
        elif kind == "End":
            self.exit_code, self.ended = int(action["code"]), self.latest

    def _counted_twice(self) -> float:
        """Seconds of the newest standstill that are a part of the newest incident: until a hung rank was found, or in a repair."""
        if not self.incidents:
            return 0.0
        began, (since, until) = float(self.incidents[-1]["began_ns"]) / 1e9, self._stall
        return max(0.0, min(until, began + float(self.incidents[-1]["total_ms"]) / 1e3) - max(since, began))

    def _note(self, raw: dict[str, Any]) -> None:
        note = raw["note"]
        if note == "incident":
            self.incidents.append(raw)
            self.stalled -= self._counted_twice()
            self.since = None
        elif note == "stall":
            self.stalled += raw["seconds"]
            self._stall = raw["since"], raw["since"] + raw["seconds"]
            self.stalled -= self._counted_twice()
        elif note == "mesh":
            self.mesh, self.places = raw["dims"], raw["ranks"]
        elif note == "kept":
            self.kept = raw
        elif note == "summary":
            self.summary = raw
        elif note == "fault":
            self.faults.append(raw.get("fired", {}))
