"""Moves the gate from the launcher's side: one word on the board, changed by compare-and-swap so that no worker's change gets lost."""

from __future__ import annotations

from collections.abc import Callable

from ftrun.core.shared import gate
from ftrun.core.shared.board import Board


def close(board: Board, generation: int, undecided: bool = False) -> int:
    """Stop the world for `generation`; return the last gate number that was opened. `undecided`: on one of several nodes."""
    return gate.unpack(_move(board, lambda raw: gate.closed(raw, generation, undecided))).last


def reopen(board: Board, generation: int) -> None:
    """Let `generation` run, unless a later generation has stopped it."""
    _move(board, lambda raw: gate.reopened(raw, generation))


def decide(board: Board, generation: int, resume: int) -> None:
    """Write the step that all go on with into the gate of a world that is stopped for `generation`; else do nothing.

    A rollback moves the gate back, a decision of several nodes may move it on by one.
    """
    _move(board, lambda raw: gate.decided(raw, resume) if gate.unpack(raw)[:2] == (generation, True) else None)


def reset(board: Board, generation: int) -> None:
    """Set the gate before the first step of a fresh world."""
    _move(board, lambda raw: gate.pack(gate.GateWord(generation, False, -1)))


def _move(board: Board, desired: Callable[[int], int | None]) -> int:
    """Replace the gate word by `desired` of it (None: leave it), and ring; return the word before."""
    while True:
        raw = board.gate()
        new = desired(raw)
        if new is None or board.swap_gate(raw, new):
            board.ring_workers()
            return raw
