"""Shows the present state of the run in the board's head: its phase, the open incident, or the reason of a standstill.

Commands read it there from outside.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftrun.control.hangs import Standstill
from ftrun.control.phases import RunPhase
from ftrun.core.account import OVER, Account
from ftrun.core.shared.board import RUN_BYTES, Board

_SHOWN = 8  # most ranks to name
_ROOM = 250  # bytes for each text of a stall
_JITTER = 0.5  # seconds by which an announced end may be off, which saves a write to the board at each look
_VICTIM = ("rank", "cell", "cause", "step", "phase")
_NAMED = RUN_BYTES // 40  # more victims than the board has room for


@dataclass
class Stall:
    """A standstill, see `Standstill`. Times in seconds, monotonic. `until`: when the launcher will act."""

    since: float
    until: float | None
    culprits: list[int]
    held_up: int  # ranks that wait
    waiting: list[int]  # some of those
    where: str
    excuse: str
    line: str = ""


class RunHead:
    """One per run. `global_rank` maps a rank of this node to one of the world; `note` writes to the journal."""

    def __init__(self, board: Board, global_rank: Callable[[int], int], note: Callable[..., None]) -> None:
        self._board = board
        self._global_rank = global_rank
        self._note = note
        self._stall: Stall | None = None
        self._account = Account()
        self._shown = b""

    @property
    def stall(self) -> Stall | None:
        """Return the standstill that is shown; None while there is none."""
        return self._stall

    def show(self, account: Account, now: float) -> None:
        """Show the account as of `now`."""
        before, self._account = self._account.open, account
        if account.phase in OVER or (account.open is not None and account.open != before):
            self._moves(now)
        self._show()

    def stalled(self, found: Standstill | None, where: Callable[[int, float], str], now: float) -> None:
        """Show the standstill that the last look for hangs detected; `where` returns the line of the script that a worker is in."""
        old = self._stall
        if found is None and old is None:
            return
        if found is None or self._account.phase != RunPhase.RUNNING:
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
        """Journal a standstill that is over, or whose culprits change."""
        if self._stall is not None:
            facts = vars(self._stall)
            kept = {name: facts[name] for name in ("since", "culprits", "held_up", "where", "line")}
            self._note("stall", seconds=round(now - self._stall.since, 3), **kept)
        self._stall = None

    def _show(self) -> None:
        stall, incident = vars(self._stall) if self._stall else None, self._incident()
        text = self._text(incident, stall)
        parts = ["line", "excuse", "where"] if stall else []
        while len(text) > RUN_BYTES and stall and parts:
            stall[parts.pop(0)] = ""
            text = self._text(incident, stall)
        while len(text) > RUN_BYTES and incident:  # the first entries say most
            longest = max(("victims", "stages", "said"), key=lambda name: len(json.dumps(incident[name])))
            incident[longest] = incident[longest][:-1]
            text = self._text(incident, stall)
        if text != self._shown:
            self._shown = text
            self._board.show_run(text)

    def _incident(self) -> dict[str, Any] | None:
        going = self._account.open
        if going is None:
            return None
        victims = [{name: getattr(v, name) for name in _VICTIM} | {"rank": self._global_rank(v.rank)} for v in going.victims[:_NAMED]]
        return {**vars(going), "victims": victims}

    def _text(self, incident: dict[str, Any] | None, stall: dict[str, Any] | None) -> bytes:
        return json.dumps({"phase": self._account.phase, "incident": incident, "stall": stall}).encode()


def _cut(text: str) -> str:
    """Return the beginning of `text` that takes at most _ROOM bytes as JSON."""
    room = _ROOM
    for at, character in enumerate(text):
        room -= len(json.dumps(character)) - 2
        if room < 0:
            return text[:at]
    return text
