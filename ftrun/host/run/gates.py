"""The gate as the launcher moves it: one word on the board, swapped so that no worker's arrival in between is lost."""

from __future__ import annotations

from collections.abc import Callable

from ftrun.core.shared import gate
from ftrun.core.shared.board import Board


def close(board: Board, generation: int) -> int:
    """Stop the world for `generation`; the last step whose gate was open."""
    return gate.unpack(_move(board, lambda raw: gate.closed(raw, generation))).last


def reopen(board: Board, generation: int) -> None:
    """Let `generation` run, unless a later one has stopped it."""
    _move(board, lambda raw: gate.reopened(raw, generation))


def rewind(board: Board, generation: int, resume: int) -> None:
    """Everyone goes back: the steps from `resume` on count as not done. Only in a world that is stopped for `generation`."""
    _move(board, lambda raw: gate.decided(raw, resume) if gate.unpack(raw)[:2] == (generation, True) else None)


def reset(board: Board, generation: int) -> None:
    """A fresh world begins before its first step."""
    _move(board, lambda raw: gate.pack(gate.GateWord(generation, False, -1)))


def _move(board: Board, desired: Callable[[int], int | None]) -> int:
    """Swap in what `desired` makes of the word, None = nothing is to be done; gives the word it was made of."""
    while True:
        raw = board.gate()
        new = desired(raw)
        if new is None or board.swap_gate(raw, new):
            board.ring_workers()
            return raw
