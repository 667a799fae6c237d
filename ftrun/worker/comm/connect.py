"""Connect the members of a process group in a separate thread, since nothing wakes a thread that waits for a dead rank.

If the world is stopped meanwhile, the thread and its store client are left behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from ftrun.core import grace, symptoms
from ftrun.core.faults import Fault
from ftrun.core.shared.board import F, Head
from ftrun.core.shared.notes import UnconnectedNote
from ftrun.core.shared.world import World
from ftrun.worker.comm.backend import LOOPBACK, Inner, came, make_group
from ftrun.worker.comm.file_store import FarMeeting, FileMeeting, Meeting
from ftrun.worker.link.exception_report import final_code
from ftrun.worker.link.position import Interrupt
from ftrun.worker.link.run_link import Context

_HOLD = 120.0  # seconds in which the launcher should end a process that reported a failed connection


@dataclass(frozen=True)
class AheadOf:
    """A replacement connects a group before it has restored its state, `after` another one; None = it is the first."""

    after: Connecting | None
    last: bool  # after this group its rank has met the others in all its groups


class Connecting:
    """One group of `world` while it connects.

    `ahead`: a replacement connects it early; this object then answers on the board that the rank is ready and reset. `on_cpu`: no tensor
    on a GPU is sent in it.
    """

    def __init__(
        self,
        context: Context,
        world: World,
        key: str,
        ranks: Sequence[int],
        my_rank: int,
        timeout: timedelta,
        ahead: AheadOf | None,
        on_cpu: bool = False,
    ) -> None:
        self.generation = world.generation
        self._context = context
        self._world = world
        self._key = key
        self._place = my_rank, len(ranks)
        self._on_cpu = on_cpu
        self._meeting: Meeting | None = None
        self._far = world.span is not None and not world.here.issuperset(ranks)  # it has members on other nodes
        self._timeout = timeout
        self._ahead = ahead
        self._wanted = True
        self._met = world.fresh
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._outcome: Inner | BaseException = Interrupt()
        if ahead is not None and ahead.after is None:
            for stage in (F.STOPPED, F.CLEANED, F.READY):
                context.answer(stage, world.generation)
        threading.Thread(target=self._run, name="ftrun-connect", daemon=True).start()

    def forget(self) -> None:
        """Note that nobody will ask for the result."""
        with self._lock:
            self._wanted = False

    def result(self, meanwhile: Callable[[], None] | None = None) -> Inner:
        """Return the connected group. `meanwhile` runs in this thread first, while the group connects.

        Raises:
            Interrupt: If a later generation stops the world.
            TimeoutError: If the group is not complete in time.
            Exception: Whatever torch raised.
        """
        context, world = self._context, self._world
        if meanwhile is not None:
            meanwhile()
        counted = time.monotonic()
        while not self._ready.wait(0.02) and time.monotonic() - counted < self._timeout.total_seconds():
            if context.stop_pending():
                self.forget()
                raise Interrupt
            if not self._all_on_their_way():
                counted = time.monotonic()
        if not self._ready.is_set():
            self.forget()  # from here on it does not report that it is connected after all
        late = f"process group {self._key} of generation {world.generation} was not complete in {self._timeout}"
        inner = self._outcome if self._ready.is_set() else TimeoutError(late)
        if isinstance(inner, BaseException):
            if not world.fresh:  # in a fresh one there is nothing to stop for
                self._report(inner)
            raise inner
        if context.stop_pending():
            inner.abort()
            raise Interrupt
        return inner

    def _report(self, error: BaseException) -> None:
        """Report a failure that no death explains, so that the launcher decides about this world.

        Raises:
            Interrupt: If the world is stopped meanwhile.
        """
        context, fault = self._context, symptoms.of_exception(error).fault
        if final_code(error) or fault not in (Fault.LINK, Fault.EXCEPTION):
            return  # a full disk or a broken device would be the same with other connections
        context.wait_until(lambda: False, grace.CONNECTING + (grace.HUNG_UP if fault is Fault.LINK else 0.0))
        evidence = symptoms.exception_evidence(type(error).__name__, symptoms.message(error))
        context.note(UnconnectedNote(context.cell.index, self.generation, evidence))
        context.cell[F.UNCONNECTED] = self.generation
        context.board.launcher_bell.ring()
        context.wait_until(lambda: bool(context.board[Head.ENDING]), _HOLD)

    def _run(self) -> None:
        before = self._ahead.after if self._ahead is not None else None
        try:
            if before is not None:
                before.join()
            self._outcome = self._connected()
            self._answer_reset()
        except BaseException as error:
            self._outcome = error
        self._ready.set()

    def join(self) -> None:
        """Wait for the end, and raise the error of a failed connection."""
        self._ready.wait()
        if isinstance(self._outcome, BaseException):
            raise self._outcome

    def _connected(self) -> Inner:
        rank, size = self._place
        meeting: Meeting
        if self._far and self._world.span is not None:
            address = self._world.span.addresses[self._world.span.node]
            meeting = FarMeeting(self._world, self._key, self._timeout, self._go_on)
        else:
            address = LOOPBACK
            meeting = FileMeeting(self._context.run_dir, self._world, self._key, self._timeout, self._go_on)
        self._meeting = meeting
        inner = make_group(meeting, rank, size, self._timeout, address, far=self._store, on_cpu=self._on_cpu)
        inner.generation = self.generation
        meeting.set(f"connected/{rank}", b"")
        inner.all_connected = lambda: meeting.check([f"connected/{r}" for r in range(size)])
        if rank == 0:
            meeting.forget_earlier()
        return inner

    def _go_on(self) -> bool:
        if self._context.board.generation() > self.generation:
            raise Interrupt
        return self._all_on_their_way()

    def _all_on_their_way(self) -> bool:
        """Has every member begun to connect? Until then the launchers' deadlines count, and not the group's timeout."""
        if not self._met and self._far:
            self._met = self._meeting is not None and self._meeting.check([came(rank) for rank in range(self._place[1])])
        elif not self._met:
            self._met = self._world.everyone(self._context.board, F.READY)
        return self._met

    def _store(self) -> Any:
        """Return a client of this run's store process for NCCL, which uses it as long as a group lives."""
        world = self._world
        store: Any = TCPStore(world.store_host, world.store_port, None, False, self._timeout, wait_for_workers=False)
        return PrefixStore(f"{world.prefix()}/{self._key}", store)

    def _answer_reset(self) -> None:
        with self._lock:  # after `forget` the main thread may answer for a later generation
            last = self._ahead is not None and self._ahead.last
            if last and self._wanted and self._context.board.generation() == self.generation:
                self._context.answer(F.RESET, self.generation)
