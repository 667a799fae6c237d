"""A node's lease: for how long its launcher's last beat keeps the places of its ranks, in two words on the board.

The launcher writes when it began the last beat that succeeded. When the lease is over, the fd store ends the ranks: the launcher may be
frozen. The others give the places away only when they saw no beat for `keep_alive` seconds, counted from when they saw the last one. That
is later than the beat began and longer than the lease, so a node's ranks have ended before anybody has their places. Clocks of two
machines are never compared. A machine that sleeps has its lease run out meanwhile.
"""

from __future__ import annotations

import time

from ftrun.core.shared.board import Board, Head

_SOONER = 1.0  # seconds by which the lease ends before the others count a node as lost; with a short keep_alive a quarter of it


def now() -> int:
    """Return nanoseconds of a clock that goes on while the machine sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def renew(board: Board, keep_alive: float, begun: int) -> None:
    """Extend the lease by a beat that succeeded; the first one begins it.

    Args:
        keep_alive: Seconds after which the others count a silent node as lost.
        begun: When the launcher began the beat, see `now`.
    """
    board[Head.RENEWED] = begun
    board[Head.LEASE] = int((keep_alive - min(_SOONER, keep_alive / 4)) * 1e9)


def end(board: Board) -> None:
    """End the lease: nobody will take the places of this node's ranks."""
    board[Head.LEASE] = 0


def left(board: Board) -> float | None:
    """Return the seconds that are left, 0 or less when the lease is over; None if there is none."""
    lease = board[Head.LEASE]
    return (lease - (now() - board[Head.RENEWED])) / 1e9 if lease else None
