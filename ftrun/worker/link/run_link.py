"""A worker's link to its run: the board, its cell, the world in which it takes part, and the waits for others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from ftrun.core import paths
from ftrun.core.errors import WorkerError
from ftrun.core.faults import Fault
from ftrun.core.shared import gate, notes
from ftrun.core.shared.board import Board, Busy, Cell, F, Flag, Head, Inexact, Phase
from ftrun.core.shared.moment import Moment
from ftrun.core.shared.notes import DoubtNote, FailureNote, LeftOutNote, Note
from ftrun.core.shared.steps import StepLog
from ftrun.core.shared.world import World, newest_world
from ftrun.worker.link.fd_store import FdStoreClient, Lent
from ftrun.worker.link.position import Interrupt, Position

LOOK_AGAIN = 0.25  # seconds between two looks when no bell rings
LOOK_RARELY = 1.0  # the same for a parked spare, for which nobody waits


class Waker(Protocol):
    """An object in which the script can block."""

    def abort(self, generation: int) -> None:
        """Make waits that belong to a world before `generation` fail soon."""

    def release(self, generation: int) -> None:
        """End what is still pending from a world before `generation`."""

    def cut_short(self, why: str) -> None:
        """The run ends: make every wait fail now, and from here on."""


class Context:
    """One per worker process; `Context.current` is None outside `ftrun`."""

    current: Context | None = None

    def __init__(
        self, run_dir: Path, cell: int, stop_timeout: float = 10.0, nonfinite: str = "redo", check_every: int = 0
    ) -> None:
        self.run_dir = run_dir
        self.board = Board.open(run_dir / paths.BOARD, for_good=True)
        self.cell: Cell = self.board.cell(cell)
        self._words = self.cell.words()
        self.gate_word = self.board.words_of_gate()
        self.phase: Callable[[Phase], None] = StepLog(
            self.cell
        ).entered  # notes that the rank enters a phase of its step
        self.fd_store = FdStoreClient(run_dir / paths.FD_STORE_SOCKET)
        self.lent = Lent(self.fd_store)
        self._world: World | None = None
        self._cells: list[Cell] = []
        self.words_of_ranks: list[memoryview] = []  # words of the cells of the world's ranks
        self.generation = 0  # of its world; 0 before it has one
        self.stopped_from = gate.pack(
            gate.GateWord(1, False, -1)
        )  # a gate word from here on means that a later generation stopped it
        self.restoring = False  # this incarnation took over a rank and has not restored its state yet
        self.stop_timeout = stop_timeout
        self.nonfinite = nonfinite
        self.check_every = check_every
        self.snapshot_every = 0  # steps between two host snapshots, 0 = none
        self.local_rank = 0  # in its world
        self.on_rank: Callable[[], None] | None = None  # called when the local rank is known
        self.patient = False  # a rank is debugged: the others wait for it as long as it takes
        self.one_console = False  # every rank's stderr goes to the same console
        self.wakers: list[Waker] = []
        self.mapped: dict[tuple[int, str], Any] = {}  # segments of ranks mapped ahead of their use
        self.mapped_epoch = self.board[Head.FD_STORE_EPOCH]  # the fd store from which the first of them came
        self.on_fd_store: Callable[[], bool] | None = None  # called when there is a new one; False = call again
        self.position = Position()
        self._doubts: dict[Inexact, DoubtNote] = {}  # notes that this worker has left
        self._pid = os.getpid()

    # -- the world ---------------------------------------------------------------------------------------------------

    @property
    def world(self) -> World | None:
        """The world in which this worker takes part."""
        return self._world

    @world.setter
    def world(self, world: World) -> None:
        self._world = world
        self.generation = world.generation
        self.stopped_from = gate.pack(gate.GateWord(world.generation + 1, False, -1))
        self._cells = [self.board.cell(place.cell) for place in world.places]
        self.words_of_ranks = [cell.words() for cell in self._cells]

    @property
    def rank(self) -> int:
        rank = self.cell.rank
        if rank is None:
            raise WorkerError("this worker has no rank yet")
        return rank

    def predecessor(self) -> Cell | None:
        """Return the cell of the incarnation whose rank this worker took over; None if it is unknown, or the rank was not replaced."""
        lost = (self.world.lost or {}).get(self.rank) if self.world is not None else None
        return None if lost is None else self.board.cell(lost)

    def cells(self) -> list[Cell]:
        """Return the cells of the world's ranks."""
        return self._cells

    def stop_pending(self) -> bool:
        """Has a later generation stopped this worker's?

        This is a plain read of the gate word: a step passes here many times, and looks again anyway.
        """
        return bool(self.gate_word[0] >= self.stopped_from)

    def check_stop_in_collective(self) -> None:
        """Raise Interrupt if the world stops (collectives outside a body are inside job.call or group set-up)."""
        if self.stop_pending():
            raise Interrupt

    def cut_short(self) -> str:
        """Return why this rank waits in vain while the run ends; "" = its wait may still succeed.

        As long as nobody has left, the ranks can finish a step, as a script that handles the signal may want to.
        """
        if not self.board[Head.ENDING] or self._world is None:
            return ""
        for place, cell in zip(self._world.places, self._cells, strict=True):
            if cell[F.EXITED] or cell.has(Flag.LEFT):
                return f"the run ends, and rank {place.rank} has left"
        word = gate.unpack(self.board.gate())
        if word.closed and word.generation >= self.generation:
            return "the run ends in the middle of a repair"
        return ""

    def await_world(
        self,
        wanted: Callable[[World], bool],
        newer_than: int,
        seconds: float,
        meanwhile: Callable[[], float] = lambda: LOOK_AGAIN,
    ) -> World:
        """Wait for a published world with a generation above `newer_than` for which `wanted` holds.

        `meanwhile` is called while there is none: when a bell rings, and after as many seconds as it returned.

        Raises:
            WorkerError: After `seconds`, or when the run ends.
        """
        deadline = time.monotonic() + seconds
        tried = newer_than
        while True:
            seen = self.board.worker_bell.count()
            published = self.board[Head.PUBLISHED]
            if published > tried:
                world = newest_world(self.run_dir, self.board)
                if wanted(world):
                    return world
                tried = world.generation
            if self.board[Head.ENDING]:
                raise WorkerError("the run ends")
            if self.board[Head.WAITING]:
                deadline = time.monotonic() + seconds
            left = deadline - time.monotonic()
            if left <= 0:
                raise WorkerError(f"no new world was published within {seconds:.0f} s; is the launcher alive?")
            self.board.worker_bell.wait(seen, min(left, meanwhile()))

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a board condition; return False after `seconds`.

        Raises:
            Interrupt: If a later generation stops this one.
            WorkerError: If the run ends, and the condition cannot hold any more.
        """
        deadline = time.monotonic() + seconds
        while True:
            seen = self.board.worker_bell.count()
            if condition():
                return True
            if self.stop_pending():
                raise Interrupt
            if why := self.cut_short():
                raise WorkerError(why)
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.board.worker_bell.wait(seen, min(left, LOOK_AGAIN))

    def answer(self, field: int, generation: int | None = None) -> None:
        """Publish that this worker reached a stage of `generation`, and when, in the field after it."""
        self.cell[field + 1] = time.monotonic_ns()
        self.cell[field] = self.generation if generation is None else generation
        self.board.launcher_bell.ring()

    def settled(self, generation: int) -> None:
        """Tell the others that this rank reads their memory no more in `generation`, so that they may go on."""
        if self.cell[F.SETTLED] < generation:
            self.cell[F.SETTLED] = generation
            self.board.ring_workers()

    def leaves(self) -> None:
        """Note that an exception has left a body or a call of the script: if the run ends, nobody need wait for this rank."""
        self.cell.add_flag(Flag.LEFT)
        self.board.ring_workers()

    def takes_part(self) -> None:
        """Take `leaves` back: the script goes on and takes a step, or makes another call."""
        if self._words[F.FLAGS] & Flag.LEFT:
            self.cell.drop_flag(Flag.LEFT)

    def milestone(self, flag: Flag) -> None:
        self.cell.add_flag(flag)
        self.board.launcher_bell.ring()

    def progress(self) -> None:
        """Give a sign of life from the script."""
        self._words[F.PROGRESS] = time.monotonic_ns()

    def busy(self, why: Busy, on: bool) -> None:
        """Ask the launcher for patience, or take that back."""
        self.progress()  # otherwise the time of the patience would count at once when it ends
        word = self.cell[F.BUSY]
        self.cell[F.BUSY] = word | why if on else word & ~why

    def note_inexact(self, why: Inexact, names: Iterable[str] = ()) -> None:
        """Note that the run may not end bit for bit as an undisturbed one.

        `names`: the names of the affected values, if they have any. The note keeps the moment at which the reason first arose.
        """
        known = self._doubts.get(why) or DoubtNote(self.cell.index, why, Moment.of(self.cell))
        doubt = replace(known, names=tuple(sorted({*known.names, *names})))
        if doubt == self._doubts.get(why):
            return
        self._doubts[why] = doubt
        self.note(doubt)
        self.cell[F.INEXACT] = self.cell[F.INEXACT] | why
        self.board.launcher_bell.ring()

    def note_left_out(self, names: Mapping[str, str]) -> None:
        """Leave a note of all values that the loop changes and ftrun does not keep, each with the reason."""
        self.note(LeftOutNote(self.cell.index, {**names}), needed=True)
        self.cell[F.LEFT_OUT] = len(names)
        self.board.launcher_bell.ring()

    def make_way(self, reason: str) -> NoReturn:
        """End this process at once: its script cannot go on from where it is, and a replacement's can.

        `reason`: a sentence about this rank, for the journal and for people. --max-replacements does not count such an end.
        """
        self.note(FailureNote(self.cell.index, self.cell[F.GENERATION], Fault.GAVE_WAY.value, reason, signature=""))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL came back")

    def note(self, note: Note, *, needed: bool = False) -> None:
        """Write a note; see `notes.write`."""
        notes.write(self.run_dir, note, needed=needed)

    def is_main_process(self) -> bool:
        """Return False in a process that the script forked (a DataLoader worker)."""
        return os.getpid() == self._pid
