"""What the run as a whole does now: its phase, the incident that goes on, or what it waits for when nothing moves.

Kept in the board's head for whoever looks from outside.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ftrun.control.events import Action, Died, Event, Publish, Raised, Say
from ftrun.control.hangs import Standstill
from ftrun.control.phases import INTERRUPTED, OVER, RunPhase
from ftrun.core.shared.board import RUN_BYTES, Board

_SHOWN = 8  # ranks that are named
_ROOM = 250  # bytes for each text of a stall
_JITTER = 0.5  # seconds by which an announced end may be off, so that the board is not written at each look
_RESTARTS = ("restarting", "world_stopped", "peer_failed")


@dataclass
class OpenIncident:
    """An incident that is not over. Times in seconds, monotonic. `stages`: phase of the controller, when it began."""

    since: float
    victims: list[dict[str, Any]] = field(default_factory=list)
    stages: list[tuple[str, float]] = field(default_factory=list)
    said: str = ""
    restart: bool = False


@dataclass
class Stall:
    """Nothing moves, see `Standstill`. Times in seconds, monotonic. `until`: when something will be done about it."""

    since: float
    until: float | None
    culprits: list[int]
    held_up: int  # ranks that wait
    waiting: list[int]  # some of those
    where: str
    excuse: str
    line: str = ""


class RunHead:
    """Follows the machine. `global_rank` makes a rank of the world of one of this node; `note` writes to the journal."""

    def __init__(self, board: Board, global_rank: Callable[[int], int], note: Callable[..., None]) -> None:
        self._board = board
        self._global_rank = global_rank
        self._note = note
        self._stall: Stall | None = None
        self._phase: str = RunPhase.NEW
        self._holders: tuple[int, ...] = ()
        self._incident: OpenIncident | None = None
        self._shown = b""

    def saw(self, event: Event, actions: tuple[Action, ...], phase: str, now: float) -> None:
        """The machine was told `event` at `now`, ordered `actions` and is in `phase`, as people are told (`State.told`)."""
        if isinstance(event, (Died, Raised)) and event.worker in self._holders and self._phase not in OVER:
            self._victim(event, now)
        for action in actions:
            if isinstance(action, Publish):
                self._holders = action.workers
            elif isinstance(action, Say) and action.what in ("stuck", *_RESTARTS):
                incident = self._open(now)
                incident.said, incident.restart = action.detail, action.what in _RESTARTS
            elif isinstance(action, Say) and action.what == "recovered":
                self._incident = None
        if phase != self._phase:
            self._phase = phase
            if phase in INTERRUPTED:
                self._open(now).stages.append((str(phase), now))
            elif phase in OVER or (self._incident and self._incident.restart):
                self._incident = None
            elif self._incident:
                self._incident.stages.append(("FIRST_STEP", now))
        self._show()

    def stalled(self, found: Standstill | None, where: Callable[[int, float], str], now: float) -> None:
        """What the last look for hangs found; `where` tells the line of the script that a worker is in."""
        old = self._stall
        if found is None and old is None:
            return
        if found is None or self._phase != RunPhase.RUNNING:
            self._moves(now)
        else:
            until = None if found.left is None else round(now + found.left, 1)
            culprits, waiting = list(found.culprits[:_SHOWN]), list(found.waiting[:_SHOWN])
            place, excuse = _cut(found.where), _cut(found.excuse)
            new = Stall(round(now - found.still, 3), until, culprits, len(found.waiting), waiting, place, excuse)
            if old is not None and old.culprits == culprits:
                new.since = old.since
                if until and old.until and abs(until - old.until) < _JITTER:
                    new.until = old.until
            if found.cells:
                new.line = _cut(where(found.cells[0], found.still))
            if old is not None and old.culprits != culprits:
                self._moves(now)
            self._stall = new
        self._show()

    def _moves(self, now: float) -> None:
        """A standstill is over, or others are to blame for it from now on."""
        if self._stall is not None:
            facts = vars(self._stall)
            kept = {name: facts[name] for name in ("since", "culprits", "held_up", "where", "line")}
            self._note("stall", seconds=round(now - self._stall.since, 3), **kept)
        self._stall = None

    def _open(self, now: float) -> OpenIncident:
        self._moves(now)
        self._incident = self._incident or OpenIncident(now)
        return self._incident

    def _victim(self, event: Died | Raised, now: float) -> None:
        rank, cell = self._global_rank(self._holders.index(event.worker)), event.worker
        cause = (event.cause if isinstance(event, Died) else event.signature) or "?"
        phase = event.phase if isinstance(event, Died) else ""
        self._open(now).victims.append({"rank": rank, "cell": cell, "cause": cause, "step": event.step, "phase": phase})

    def _show(self) -> None:
        text = self._text()
        parts = [(vars(self._stall), name) for name in ("line", "excuse", "where")] if self._stall else []
        while len(text) > RUN_BYTES and parts:
            kept, name = parts.pop(0)
            kept[name] = ""
            text = self._text()
        while len(text) > RUN_BYTES and self._incident is not None:  # what came first says most
            kept = vars(self._incident)
            longest = max(("victims", "stages", "said"), key=lambda name: len(json.dumps(kept[name])))
            kept[longest] = kept[longest][:-1]
            text = self._text()
        if text != self._shown:
            self._shown = text
            self._board.show_run(text)

    def _text(self) -> bytes:
        incident = self._incident and vars(self._incident)
        stall = self._stall and vars(self._stall)
        return json.dumps({"phase": self._phase, "incident": incident, "stall": stall}).encode()


def _cut(text: str) -> str:
    """The beginning of `text` that takes at most _ROOM bytes as JSON."""
    room = _ROOM
    for at, character in enumerate(text):
        room -= len(json.dumps(character)) - 2
        if room < 0:
            return text[:at]
    return text
