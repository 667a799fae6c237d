"""The run that a command acts on: found by name, this user's, and live; and its ranks as the board shows them."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftrun.core.errors import EXIT_NOT_RUNNING, FtrunError, NoRunError, UsageError
from ftrun.core.text import printable

if TYPE_CHECKING:
    from ftrun.core.runs import RunInfo
    from ftrun.core.shared.board import Board, Cell
    from ftrun.core.shared.world import World


@dataclass
class Live:
    """A live run. `look` again after anything changed."""

    run: RunInfo
    board: Board

    @classmethod
    def find(cls, run_id: str | None) -> Live:
        """Errors: NoRunError, UsageError for a run of another user."""
        from ftrun.core import paths, runs
        from ftrun.core.shared.board import Board, Head

        run = runs.find_run(run_id)
        if run is None:
            raise _missing(run_id)
        owner = os.stat(run.path).st_uid
        if owner != os.getuid():
            raise UsageError(f"run {run.run_id} belongs to user {owner}, not to you")
        try:
            board = Board.open(run.path / paths.BOARD)
        except OSError:
            raise NoRunError(f"run {run.run_id} starts or ends just now", EXIT_NOT_RUNNING) from None
        if board[Head.ENDING] or not board[Head.PUBLISHED]:
            raise NoRunError(f"run {run.run_id} starts or ends just now", EXIT_NOT_RUNNING)
        return cls(run, board)

    def alive(self) -> bool:
        """Is the run still going on?"""
        from ftrun.core.shared.board import Head

        return self.run.alive() and not self.board[Head.ENDING]

    def ended_within(self, seconds: float) -> bool:
        """Wait so long, or for the end of the run, whichever comes first; has it ended?"""
        with contextlib.suppress(ProcessLookupError):
            launcher = os.pidfd_open(self.run.pid)
            try:
                select.select([launcher], [], [], min(seconds, 1e9))
            finally:
                os.close(launcher)
        return not self.alive()

    def world(self) -> World:
        """The newest world. Errors: NoRunError."""
        from ftrun.core.shared.board import Head
        from ftrun.core.shared.world import read_world

        try:
            return read_world(self.run.path, self.board[Head.PUBLISHED])
        except OSError:
            raise NoRunError(f"run {self.run.run_id} ended just now", EXIT_NOT_RUNNING) from None

    def cell(self, rank: int) -> Cell:
        """The cell of the worker that holds `rank`. Errors: UsageError when this node's part of the run has no such rank."""
        world = self.world()
        try:
            return self.board.cell(world.cell_of(rank))
        except KeyError:
            first, last = world.places[0].rank, world.places[-1].rank
            here = (
                "the run has" if len(world.places) == self.run.raw.get("world_size") and not first else "this node has"
            )
            raise UsageError(f"there is no rank {rank} here: {here} ranks {first} to {last}") from None


def _missing(run_id: str | None) -> FtrunError:
    from ftrun.core import runs

    if run_id is None:
        return NoRunError("no live run")
    run = runs.run_named(run_id)
    if run is not None:
        return NoRunError(f"run {run_id} is not running: its launcher, process {run.pid}, is gone", EXIT_NOT_RUNNING)
    owner = runs.owner_elsewhere(run_id)
    if owner is not None:
        return UsageError(f"run {run_id} belongs to user {owner}, not to you")
    return NoRunError(f"no live run named {run_id}; those that are: ftrun runs")


def confirmed(question: str, yes: bool) -> bool:
    """Ask a person at a terminal; whoever is not at one meant what was typed."""
    if yes or not sys.stdin.isatty():
        return True
    print(f"ftrun: {printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
