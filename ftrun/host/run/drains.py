"""Carries out requests from any node to move a rank of this one, or the whole node, and shows what came of them, under "drains".

`ftrun drain` on another node sees it there, by the request's key. This file decides nothing about recovery.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ftrun.control.phases import RunPhase
from ftrun.core.account import Account
from ftrun.core.faults import Fault
from ftrun.core.shared import gate
from ftrun.core.shared.board import F, Head
from ftrun.faults import requests, trigger
from ftrun.host.base.context import LaunchContext
from ftrun.host.nodes.node_group import Peers

SUBJECT = "drains"
_SHOWN = 4  # newest outcomes
_AGAIN = 0.5  # seconds between two tries to give this node's place up


@dataclass
class _Asked:
    """A request that waits for its outcome. `rank` None: for the whole node. `until`: when it must have begun, monotonic."""

    key: str
    rank: int | None
    until: float
    number: int = 0  # of the request in this run directory
    firing: trigger.Firing | None = None


class DrainDesk:
    """Those of one run. `holders` maps ranks of the world to the cells of this node's workers."""

    def __init__(
        self, context: LaunchContext, nodes: Peers, holders: Callable[[], Mapping[int, int]], account: Callable[[], Account]
    ) -> None:
        self._run_dir = context.run_dir
        self._board = context.board
        self._listener = context.listener
        self._nodes = nodes
        self._holders = holders
        self._account = account
        self._waiting: list[_Asked] = []
        self._shown: dict[str, dict[str, Any]] = {}
        self._next = 0.0  # when to try again, monotonic

    def passes_on(self, request: requests.Request) -> None:
        """Ask the node that has the rank, or the node itself, for what a command asked of this launcher."""
        rank = request.rank if request.node < 0 else None
        why = self._nodes.asks({"key": request.key, "node": request.node, "rank": rank, "seconds": request.seconds})
        if why:
            self._show(request.key, moved=False, why=why)

    def asked(self, request: Mapping[str, Any]) -> None:
        """Begin what a person asks of this node; see membership.drains."""
        key, rank, begun = str(request["key"]), request["rank"], time.monotonic()
        asked = _Asked(key, rank, begun + float(request["seconds"]))
        if rank is not None:
            why = self._why_not(rank)
            if why:
                self._show(key, moved=False, why=why)
                return
            wanted = requests.Request(requests.DRAIN, Fault.DRAIN.value, rank=rank, at="idle")
            try:
                asked.number = self._board[Head.REQUESTS] = requests.post(self._run_dir, wanted).number
            except OSError as error:
                self._show(key, moved=False, why=f"its node cannot write the request: {error.strerror}")
                return
        what = "this node is to be drained" if rank is None else f"rank {rank} is to leave its worker"
        self._listener.log(f"{what}, as asked on node {request['by']}")
        self._waiting.append(asked)

    def fired(self, firing: trigger.Firing) -> None:
        """Hear that a rank waits between two steps for its end."""
        for asked in self._waiting:
            if (firing.source, firing.fault) == (requests.REQUEST, asked.number):
                asked.firing = firing

    def refused(self, why: str) -> None:
        """Hear why this node cannot give its place up."""
        for asked in [asked for asked in self._waiting if asked.rank is None]:
            self._end(asked, moved=False, why=why)

    # -- looks -------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Go on with what was asked for."""
        for asked in list(self._waiting):
            if asked.rank is None:
                self._look_at_node(asked)
            else:
                self._look_at_rank(asked, asked.rank)

    def _look_at_rank(self, asked: _Asked, rank: int) -> None:
        if asked.firing is None:
            if time.monotonic() > asked.until and requests.take(self._run_dir, asked.number):
                self._end(asked, moved=False, why="it began no new step in that time")
            return
        cell = self._board.cell(self._holders()[rank]) if rank in self._holders() else None
        pid = asked.firing.pid
        if cell is not None and cell[F.PID] not in (0, pid) and cell[F.RESUMED] >= self._account().generation:
            self._end(asked, moved=True, step=asked.firing.step, **{"from": pid, "to": cell[F.PID]})
        elif time.monotonic() > asked.until:
            self._end(asked, moved=False, why="its new worker is not at work in that time")

    def _look_at_node(self, asked: _Asked) -> None:
        now, account = time.monotonic(), self._account()
        why = next(filter(None, map(self._why_not, self._holders())), "")
        quiet = account.phase == RunPhase.RUNNING and account.open is None
        if why:
            self._end(asked, moved=False, why=why)
        elif now > asked.until:
            self._end(asked, moved=False, why="no moment came in that time in which nothing is repaired, and every rank has made a step")
        elif quiet and gate.unpack(self._board.gate()).last >= 0 and now >= self._next:
            self._next = now + _AGAIN
            self._nodes.gives_up()

    def _why_not(self, rank: int) -> str:
        cell = self._holders().get(rank)
        return f"rank {rank} is on no worker just now" if cell is None else requests.why_not_moved(rank, self._board.cell(cell))

    def _end(self, asked: _Asked, **outcome: Any) -> None:
        self._waiting.remove(asked)
        self._show(asked.key, **outcome)

    def _show(self, key: str, **outcome: Any) -> None:
        self._listener.note("drain-outcome", key=key, **outcome)
        self._shown = dict([*self._shown.items(), (key, outcome)][-_SHOWN:])
        self._nodes.shows(SUBJECT, self._shown)
