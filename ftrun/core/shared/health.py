"""How the ranks of a node are, read from its board by columns: the launcher shows it to other nodes, and `ftrun status` to a person."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ftrun.core.shared.board import Board, Cell, F, Flag, Head

STALE = 2.0  # seconds without a beat
_PROTECTED, _STEPPED = int(Flag.PROTECTED), int(Flag.STEPPED)  # ints, because testing an enum is ten times slower


def used_cells(board: Board) -> int:
    """Return the number of cells up to the last one that a process ever used."""
    pids = board.column(F.PID, min(board[Head.ROOM], board.cells))
    return max((at + 1 for at, pid in enumerate(pids) if pid), default=0)


def living(board: Board, used: int) -> list[int]:
    """Return the cells of processes that were not reaped."""
    pids, exited = board.column(F.PID, used), board.column(F.EXITED, used)
    return [i for i, (pid, gone) in enumerate(zip(pids, exited, strict=True)) if pid and not gone]


def unwell(
    board: Board, holders: Mapping[int, int], used: int, now: int, accused: Collection[int] = ()
) -> tuple[list[int], int]:
    """Return the ranks that are not healthy, and the oldest beat of the living ranks (monotonic ns, 0 = none beats).

    A rank is healthy if its process lives and beats, or exited with 0. A rank that never beats (a program) counts while it
    lives; a rank that is `accused` of holding the others up does not count. `holders` maps cells to ranks.
    """
    exited, status = board.column(F.EXITED, used), board.column(F.EXIT_STATUS, used)
    beats, oldest = board.column(F.BEAT, used), now - int(STALE * 1e9)

    def well(i: int) -> bool:
        return i < used and holders[i] not in accused and (not status[i] if exited[i] else not 0 < beats[i] < oldest)

    ill = [rank for i, rank in holders.items() if not well(i)]
    return ill, min((beats[i] for i in holders if i < used and beats[i] and not exited[i]), default=0)


def protected(board: Board, holders: Collection[int], used: int) -> tuple[bool | None, bool]:
    """Has every rank called protect(), and has any rank trained? None if no rank has trained without protect() yet. `holders`: cells."""
    column = board.column(F.FLAGS, used)
    flags = [column[i] if i < used else 0 for i in holders]
    trained = any(f & _STEPPED for f in flags)
    if flags and all(f & _PROTECTED for f in flags):
        return True, trained
    return (False if any(f & _STEPPED and not f & _PROTECTED for f in flags) else None), trained


def next_step(last: int, cell: Cell | None) -> int:
    """Return the index of the step whose update comes next, after gate `last`; the gate at the end of a loop belongs to no step.

    `cell`: of any rank.
    """
    if cell is None or last < 0:
        return 0
    return last + 1 + cell.shift - int(cell.has(Flag.LOOP_DONE))
