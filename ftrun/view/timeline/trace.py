"""Write the whole run as a Chrome trace (chrome://tracing, ui.perfetto.dev): a track for the controller and for each rank.

The journal is the only source. Times are microseconds after its first line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ftrun.core.account import PARTS
from ftrun.core.shared import mesh
from ftrun.view.timeline.model import OPTIMIZER, TRAINING
from ftrun.view.timeline.transfer import H2D, KINDS, SRC

_CONTROLLER = 0  # the trace's process for the controller; ranks are _RANKS + rank, spares _SPARES
_RANKS, _SPARES = 1000, 1
_LANES = ("repair", "steps", "sends its share", "takes the state")
_STEPS, _SENDS, _TAKES = 1, 2, 3
_COLOURS = {
    "STOPPING": "terrible",
    "CLEANING": "bad",
    "RESETTING": "bad",
    "RESTORING": "good",
    "RUNNING": "vsync_highlight_color",
}


def document(lines: Iterable[dict[str, Any]], run: str) -> str:
    """Return the trace of a journal's `lines` as JSON text."""
    maker = _Maker()
    for line in lines:
        maker.add(line)
    maker.finish()
    return (
        json.dumps(
            {"traceEvents": maker.events, "displayTimeUnit": "ms", "otherData": {"run": run, "by": "ftrun timeline"}}
        )
        + "\n"
    )


class _Maker:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._zero: float | None = None
        self._now = 0.0
        self._phase = ""
        self._phase_since = 0.0
        self._holders: dict[int, int] = {}
        self._first = 0  # this node's first rank in the world
        self._ranks: dict[int, int] = {}  # cell -> the last rank it held
        self._stage: dict[int, tuple[str, float]] = {}
        self._named: set[tuple[int, int | None]] = set()
        self._places: dict[str, dict[str, int]] = {}  # rank -> its coordinates on the script's mesh

    def add(self, line: dict[str, Any]) -> None:
        if "t" not in line:
            return
        self._zero = line["t"] if self._zero is None else self._zero
        self._now = self._us(line["t"])
        if "event" in line:
            self._event(line["event"])
        elif "phase" in line:
            self._answer(line)
        elif line.get("note") == "incident":
            self._incident(line)
        elif "note" in line:
            self._note(line)

    def finish(self) -> None:
        """End the last phase, and add the mesh coordinates to the names of the ranks' tracks."""
        self._phase_ends("")
        for event in self.events:
            if event["name"] == "process_name" and event["pid"] >= _RANKS:
                rank = event["pid"] - _RANKS
                event["args"]["name"] = mesh.of_rank(rank, self._places.get(str(rank)))

    def _us(self, seconds: float) -> float:
        return round((seconds - (self._zero or 0.0)) * 1e6, 3)

    # -- lines -------------------------------------------------------------------------------------------------------

    def _event(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "Stage":
            self._reached(event["worker"], event["stage"])
        elif kind in ("Died", "Raised"):
            why = event.get("cause") or event.get("signature")
            self._instant(
                f"Failure: {why}", event["worker"], {k: event[k] for k in ("step", "phase", "code") if k in event}
            )
            self._stage.pop(event["worker"], None)
        elif kind in ("Started", "Parked", "Protected", "Finished"):
            self._instant(kind, event["worker"], {})

    def _answer(self, line: dict[str, Any]) -> None:
        for action in line.get("actions", ()):
            if action["kind"] == "Publish":
                self._holders = dict(enumerate(action["workers"], self._first))
                self._ranks.update({cell: rank for rank, cell in self._holders.items()})
        if line["phase"] != self._phase:
            self._phase_ends(line["phase"])

    def _phase_ends(self, next_phase: str) -> None:
        if self._phase:
            slice_ = {"name": self._phase, "ph": "X", "ts": self._phase_since, "dur": self._now - self._phase_since}
            self._name(_CONTROLLER, None, "Controller")
            colour = {"cname": _COLOURS[self._phase]} if self._phase in _COLOURS else {}
            self.events.append({**slice_, "pid": _CONTROLLER, "tid": 0, **colour})
        self._phase, self._phase_since = next_phase, self._now

    def _reached(self, worker: int, stage: str) -> None:
        """Add a slice from the worker's previous stage to this one."""
        before = self._stage.get(worker)
        self._stage[worker] = (stage, self._now)
        if before is not None and stage != "stopped":
            self._slice(stage, worker, before[1], self._now, {})

    def _incident(self, line: dict[str, Any]) -> None:
        began = self._us(float(line["began_ns"]) / 1e9)
        at = began
        for part in PARTS:
            length = float(line["ms"].get(part, 0.0)) * 1e3
            name = part.replace("_", " ")
            self._name(_CONTROLLER, 1, "incidents, by part")
            self.events.append(
                {"name": name, "ph": "X", "ts": round(at, 3), "dur": length, "pid": _CONTROLLER, "tid": 1}
            )
            at += length
        facts = {k: line[k] for k in ("victims", "sources", "redone", "total_ms", "resume") if k in line}
        self.events.append(
            {"name": "incident", "ph": "i", "s": "g", "ts": began, "pid": _CONTROLLER, "tid": 1, "args": facts}
        )
        for kept in line.get("phases", ()):
            for row in kept["steps"]:
                self._step(kept["cell"], row, began)
        for moved in line.get("moves", ()):
            for row in moved["moves"]:
                self._move(moved["cell"], row, began)

    def _move(self, cell: int, row: list[Any], began: float) -> None:
        stage, source, begin, end = row
        kind = KINDS.get(stage, stage)
        lane = _SENDS if kind in (H2D, SRC) else _TAKES
        self._slice(kind, cell, began + begin * 1e3, began + end * 1e3, {"of rank": source}, lane)

    def _step(self, cell: int, row: list[Any], began: float) -> None:
        step, generation, attempt, *times = row
        for at, kind in enumerate(TRAINING):
            begin, end = times[at], next((t for t in times[at + 1 :] if t is not None), None)
            if begin is None or end is None:
                continue
            facts = {"step": step, "generation": generation, "attempt": attempt}
            self._slice(kind, cell, began + begin * 1e3, began + end * 1e3, facts, _STEPS)
            if kind == OPTIMIZER:
                self.events[-1]["cname"] = "yellow"

    def _note(self, line: dict[str, Any]) -> None:
        if line["note"] == "world":
            self._first = int(line.get("first_rank", 0))
        if line["note"] == "mesh" and "0" in line["ranks"]:  # ranks of another node count from 0 here
            self._places = line["ranks"]
        if line["note"] == "fault":
            fired = line["fired"]
            at = self._us(float(fired["t"]))
            name = f"injected: {fired['kind']} of rank {fired['rank']}"
            self.events.append(
                {"name": name, "ph": "i", "s": "g", "ts": at, "pid": _CONTROLLER, "tid": 1, "args": fired}
            )

    # -- trace events ------------------------------------------------------------------------------------------------

    def _track(self, worker: int) -> int:
        rank = self._ranks.get(worker)
        return _SPARES if rank is None else _RANKS + rank

    def _name(self, track: int, thread: int | None, name: str) -> None:
        if (track, thread) in self._named:
            return
        self._named.add((track, thread))
        what = "process_name" if thread is None else "thread_name"
        self.events.append({"name": what, "ph": "M", "pid": track, "tid": thread or 0, "args": {"name": name}})
        if thread is None:
            self.events.append(
                {"name": "process_sort_index", "ph": "M", "pid": track, "tid": 0, "args": {"sort_index": track}}
            )

    def _place(self, worker: int, lane: int) -> dict[str, int]:
        track = self._track(worker)
        self._name(track, None, "spares" if track == _SPARES else f"rank {track - _RANKS}")
        thread = worker * len(_LANES) + lane
        self._name(track, thread, f"worker {worker}, {_LANES[lane]}")
        return {"pid": track, "tid": thread}

    def _slice(self, name: str, worker: int, begin: float, end: float, facts: dict[str, Any], lane: int = 0) -> None:
        place = self._place(worker, lane)
        self.events.append(
            {"name": name, "ph": "X", "ts": round(begin, 3), "dur": round(end - begin, 3), **place, "args": facts}
        )

    def _instant(self, name: str, worker: int, facts: dict[str, Any]) -> None:
        place = self._place(worker, 0)
        self.events.append({"name": name, "ph": "i", "s": "p", "ts": self._now, **place, "args": facts})
