"""The run that a command changes: found by name, this user's, and live; and its ranks as the board shows them.

Nobody's run is changed by surprise: a command acts on a run without its name only if that is the one live run and was started
in this folder; it says which run it is, and asks first.
"""

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
    def find(cls, run_id: str | None, example: str) -> Live:
        """The run that `chosen` chooses; raises NoRunError also for one that starts or ends just now."""
        from ftrun.core import paths
        from ftrun.core.shared.board import Board, Head
        from ftrun.view import nodes

        run = chosen(run_id, example)
        try:
            board = Board.open(run.path / paths.BOARD)
        except OSError:
            raise NoRunError(f"run {run.run_id} starts or ends just now", EXIT_NOT_RUNNING) from None
        if not board[Head.PUBLISHED] and any(node["here"] and node["node"] is None for node in nodes.read(run.path)):
            raise NoRunError(f"this node waits beside run {run.run_id} as a spare one; ask on a node that takes part", EXIT_NOT_RUNNING)
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
        """The newest world.

        Raises:
            NoRunError
        """
        from ftrun.core.shared.world import newest_world

        try:
            return newest_world(self.run.path, self.board)
        except OSError:
            raise NoRunError(f"run {self.run.run_id} ended just now", EXIT_NOT_RUNNING) from None

    def cell(self, rank: int) -> Cell:
        """The cell of the worker that holds `rank`.

        Raises:
            UsageError: When this node's part of the run has no such rank.
        """
        world = self.world()
        try:
            return self.board.cell(world.cell_of(rank))
        except KeyError:
            first, last = world.places[0].rank, world.places[-1].rank
            here = (
                "the run has" if len(world.places) == self.run.raw.get("world_size") and not first else "this node has"
            )
            raise UsageError(f"there is no rank {rank} here: {here} ranks {first} to {last}") from None


def chosen(run_id: str | None, example: str) -> RunInfo:
    """The live run to act on; without a name the one that can be meant.

    `example` is the command line that would name it, with RUN in it.

    Raises:
        NoRunError
        UsageError: For a run of another user, and without a name when several runs live or the only one was started in another folder.
    """
    from ftrun.core import runs

    found = [run for run in runs.list_runs() if run_id in (None, run.run_id)]
    if not found:
        raise _missing(run_id)
    run = found[0]
    if len(found) > 1:
        listed = "; ".join(map(described, found))
        raise UsageError(f"{len(found)} runs are live, so say which: {_named(example, found)} ({listed})", explain="F104")
    if run_id is None and not _started_here(run):
        raise UsageError(
            f"the live run was not started in this folder, so say that you mean it: {_named(example, found)} ({described(run)})",
            explain="F104",
        )
    owner = os.stat(run.path).st_uid
    if owner != os.getuid():
        raise UsageError(f"run {run.run_id} belongs to user {owner}, not to you")
    return run


def _named(example: str, found: list[RunInfo]) -> str:
    return f"ftrun {example.replace('RUN', found[0].run_id if len(found) == 1 else 'RUN')}"


def described(run: RunInfo) -> str:
    """A run as a person knows it: its name, script and folder."""
    script = " ".join(run.raw.get("argv", ())[:1]) or "?"
    return f"{run.run_id}: {script} in {run.raw.get('cwd', '?')}"


def _started_here(run: RunInfo) -> bool:
    try:
        return run.raw.get("cwd") == os.getcwd()
    except OSError:
        return False  # this folder was removed


def _missing(run_id: str | None) -> FtrunError:
    from ftrun.core import runs

    if run_id is None:
        return NoRunError("no live run; those that ended: ftrun runs --all")
    run = runs.run_named(run_id)
    if run is not None:
        return NoRunError(f"run {run_id} is not running: its launcher, process {run.pid}, is gone", EXIT_NOT_RUNNING)
    owner = runs.owner_elsewhere(run_id)
    if owner is not None:
        return UsageError(f"run {run_id} belongs to user {owner}, not to you")
    return NoRunError(f"no live run named {run_id}; those that live: ftrun runs")


def confirmed(question: str, yes: bool) -> bool:
    """Ask a person, unless `yes`.

    Raises:
        UsageError: When there is no terminal to ask at.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"{question} There is no terminal to ask at: add --yes if it is meant", explain="F104")
    print(f"ftrun: {printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
