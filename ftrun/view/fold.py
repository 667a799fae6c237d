"""Choose the ranks to show one by one: those that stand out; count all others. Reads the board by columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from ftrun.core.shared.board import Board, F, Flag
from ftrun.core.shared.health import STALE
from ftrun.core.shared.moment import Moment, phase_from

# reasons why a rank stands out, the gravest first
REASONS = (
    "gone",
    "the others wait for it",
    "no sign of life",
    "not in step with most",
    "not where most wait",
    "waits long",
    "does a step again",
)
_ACCUSED = REASONS[1]
_WAITS = 1.0  # seconds in a collective after which a rank stands out
_ALIVE = int(Flag.ALIVE)  # an int, because testing an enum is ten times slower


def moved(board: Board, used: int) -> tuple[int, int]:
    """Return the bytes moved so far and the total bytes of all current transfers."""
    totals = board.column(F.MOVE_TOTAL, used)
    done = board.column(F.MOVED, used)
    return sum(d for d, t in zip(done, totals, strict=True) if t), sum(totals)


def choose(
    board: Board, used: int, holders: dict[int, int], most: int | None, now: int, accused: Collection[int] = ()
) -> tuple[dict[int, str], dict[str, Any]]:
    """Choose at most `most` cells to show one by one.

    Args:
        accused: Ranks that hold the others up, as the launcher reports.

    Returns:
        The chosen cells in order of rank, each with its reason to stand out (of REASONS, "" = none); and the activity of all
        other ranks: {"ranks": n, "doing": [[text, n], ...]}.
    """
    cells = sorted(holders, key=lambda i: holders[i])
    if most is None or len(cells) <= most:
        return {i: _ACCUSED if holders[i] in accused else "" for i in cells}, {"ranks": 0, "doing": []}
    exited, beats = board.column(F.EXITED, used), board.column(F.BEAT, used)
    steps, phases = board.column(F.STEP, used), board.column(F.PHASE, used)
    since, attempts = board.column(F.COLLECTIVE_SINCE, used), board.column(F.ATTEMPT, used)
    flags = board.column(F.FLAGS, used)
    here = [i for i in cells if i < used]
    usual = Counter(steps[i] for i in here).most_common(1)[0][0] if here else 0
    oldest, long_ago = now - int(STALE * 1e9), now - int(_WAITS * 1e9)
    mostly_wait = sum(1 for i in here if 0 < since[i] < long_ago) * 2 > len(here)
    ranked = []
    for i in cells:
        if i >= used or exited[i] or not flags[i] & _ALIVE:
            ranked.append((0, 0, i))
        elif holders[i] in accused:
            ranked.append((1, 0, i))
        elif 0 < beats[i] < oldest:
            ranked.append((2, beats[i], i))
        elif steps[i] != usual:
            ranked.append((3, steps[i], i))
        elif mostly_wait and not since[i]:
            ranked.append((4, 0, i))
        elif 0 < since[i] < long_ago and not mostly_wait:
            ranked.append((5, since[i], i))
        elif attempts[i]:
            ranked.append((6, 0, i))
    taken = {i: REASONS[grave] for grave, _, i in sorted(ranked)[:most]}
    shown = list(taken)
    shown += [i for i in cells[: most + len(shown)] if i not in taken][: most - len(shown)]
    rest = set(cells).difference(shown)
    busy, ends = board.column(F.BUSY, used), board.column(F.LOOP_END, used)
    doing = Counter((phases[i], int(busy[i]), steps[i], ends[i]) for i in rest if i < used)
    lines = [[_doing(*words), count] for words, count in doing.most_common(4)]
    other = len(rest) - sum(doing.values())
    if other:
        lines.append(["not begun", other])
    chosen = {i: taken.get(i, "") for i in sorted(shown, key=lambda i: holders[i])}
    return chosen, {"ranks": len(rest), "doing": lines}


def _doing(phase: int, busy: int, step: int, end: int) -> str:
    return doing(phase_from(phase, busy, step, end), step - 1 if step else None)


def doing(phase: str, step: int | None) -> str:
    """Return the words for the activity of folded ranks."""
    return Moment(phase, step).words().removeprefix("in ") or phase
