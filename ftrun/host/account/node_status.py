"""Shows the other nodes how this one is, under the subject "status": less than a kilobyte, however long the run and its story are.

`ftrun status` on any node shows it, from the file in which that node's launcher keeps what it saw (`paths.NODES`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ftrun.core.account import Account
from ftrun.core.shared import gate, health
from ftrun.core.shared.board import Board, Flag
from ftrun.host.account.run_head import Stall
from ftrun.host.nodes.node_group import Peers

SUBJECT = "status"
_PAUSE = 1.0  # seconds between two looks, at least
_NAMED = 8  # most ranks to name
_ROOM = 60  # characters for each text of a stall


class NodeStatus:
    """One per run. `run`: the name of this node's run directory; `spares`: how many are wanted."""

    def __init__(self, board: Board, nodes: Peers, run: str, spares: int) -> None:
        self._board = board
        self._nodes = nodes
        self._fixed = {"run": run, "spares_wanted": spares}
        self._shown: dict[str, Any] = {}
        self._next = 0.0  # when the next look is due, monotonic

    def show(self, account: Account, holders: Mapping[int, int], stall: Stall | None, quarantined: int) -> None:
        """Show how this node is, if that has changed. `holders` maps ranks of the world to cells; `quarantined` counts devices."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PAUSE
        facts = {**self._fixed, **self._ranks({cell: rank for rank, cell in holders.items()}, stall)}
        facts |= {"phase": account.phase, "repairing": account.open is not None, "generation": account.generation}
        facts |= {"replacements": len(account.replaced), "restarts": account.restarts, "quarantined": quarantined}
        facts["stall"] = None if stall is None else _told(stall, now)
        if facts != self._shown:
            self._shown = facts
            self._nodes.shows(SUBJECT, facts)

    def _ranks(self, holders: Mapping[int, int], stall: Stall | None) -> dict[str, Any]:
        board, used = self._board, health.used_cells(self._board)
        spares = [board.cell(i) for i in health.living(board, used) if i not in holders]
        ill, _ = health.unwell(board, holders, used, time.monotonic_ns(), stall.culprits if stall else ())
        last = gate.unpack(board.gate()).last
        return {
            "healthy": len(holders) - len(ill),
            "unwell": sorted(ill)[:_NAMED],
            "spares": len(spares),
            "spares_ready": sum(cell.has(Flag.PARKED) for cell in spares),
            "protected": health.protected(board, holders, used)[0],
            "step": health.next_step(last, board.cell(next(iter(holders))) if holders else None),
        }


def _told(stall: Stall, now: float) -> dict[str, Any]:
    """Return a standstill as the picture of `ftrun status --json` has it."""
    return {
        "seconds": round(now - stall.since),
        "acts_in": None if stall.until is None else max(0, round(stall.until - now)),
        "culprits": stall.culprits,
        "held_up": stall.held_up,
        "waiting": stall.waiting,
        "where": stall.where[:_ROOM],
        "excuse": stall.excuse,
        "line": stall.line[-_ROOM:],
    }
