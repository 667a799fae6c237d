"""Owns the worker processes: watches, fences and releases them, and turns changes on the board and in the kernel into events.

Handlers only emit events; the machine decides what follows. The pool reports a worker's death exactly once.

Theory of operation. `add` prepares cell and pipes, `forked` learns the pid. Three sources then announce an end: the lost liveness lock
(at once), the pidfd (when the process is gone), the exit code (`exited`, from whoever reaps). The first leads to `_report`, which waits
briefly for the exit code, scans the board once more, and emits Finished or Died; it holds back a death that a peer's death explains.
`fence` kills the process and marks the cell (F.FENCED 1: the process runs no more code; 2: it did not stop by the deadline).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable

from ftrun import native
from ftrun.control import blame
from ftrun.control.events import (
    Died,
    Doubted,
    Dying,
    Event,
    Finished,
    Grouped,
    LoopDone,
    Parked,
    Protected,
    Raised,
    Stage,
    Started,
    Stepped,
    Unconnected,
    Unrestorable,
)
from ftrun.core import grace, paths, symptoms
from ftrun.core.errors import EXIT_SIGNAL
from ftrun.core.faults import Fault
from ftrun.core.shared import notes
from ftrun.core.shared.board import Cell, F, Flag, Inexact
from ftrun.core.shared.moment import phase_of
from ftrun.core.shared.notes import FailureNote, ParkedNote, UnconnectedNote, UnrestorableNote, WhereNote
from ftrun.core.system import procfs
from ftrun.core.waiting import wait_for
from ftrun.host.base.context import LaunchContext
from ftrun.host.output.logs import Logs, WorkerLog
from ftrun.host.workers import fence
from ftrun.host.workers.oom_kills import Kills

_CODE_LOOK = 0.001  # seconds between two looks for the exit code of a worker that died in its loop
_CODE_LATEST, _CODE_LATE_LOOK = 10.0, 0.1  # seconds until a death is reported without an exit code, and between two looks until then
_ENDS_SOON = 0.3  # seconds; a process that lost its lock and lives on after them runs another program
_LOOK_AGAIN = 0.05
_CAUSE_LOOK = 0.005  # seconds between two checks for other ranks that may still die
_LEFTOVERS = 2.0  # seconds from a worker's end to the removal of its files: a repair has no time for that
_EXEC = "started another program in place of itself (exec)"
_AFTER_EXEC = (
    "what that does is not protected, and only its end is seen; set the variables that it sets (LD_PRELOAD, PYTHONHASHSEED) for "
    "ftrun itself, and no worker has to start again"
)
_LOCK_LOOK = 0.01  # seconds between two checks that a restarted interpreter holds its lock again
_FENCE_INLINE, _FENCE_LOOK = 0.005, 0.0002
_FENCE_DEADLINE = 5.0
_LOOK, _LOOK_GPU = 0.001, 0.005  # seconds between two looks at a process that is being fenced
_STAGES = (
    (F.STOPPED, "stopped"),
    (F.CLEANED, "cleaned"),
    (F.READY, "ready"),
    (F.RESET, "reset"),
    (F.RESTORED, "restored"),
    (F.RESUMED, "resumed"),
    (F.FIRST_DONE, "first_done"),
)
_MILESTONES: tuple[tuple[Flag, Callable[[float, int], Event]], ...] = (
    (Flag.PARKED, Parked),
    (Flag.GROUP, Grouped),
    (Flag.PROTECTED, Protected),
    (Flag.STEPPED, Stepped),
)


class Worker:
    """One worker incarnation. `pid` 0: not forked yet; `code` None: not known yet."""

    def __init__(self, cell: Cell, rank: int | None) -> None:
        self.index = cell.index
        self.cell = cell
        self.rank = rank
        self.pid = 0
        self.code: int | None = None
        self.cause = ""  # the reason of `condemn`; `fault` and `evidence` come with it
        self.fault = Fault.SIGNAL
        self.evidence = ""
        self.reported = False  # the machine knows of its end, or the pool holds the death back
        self.anew = False  # it restarted as a fresh interpreter
        self.lost = False  # it lost its liveness lock
        self.ended = False  # reaped
        self.flags = 0
        self.raised = 0
        self.no_source = 0
        self.unconnected = 0
        self.doubts = (0, 0)  # F.INEXACT, F.LEFT_OUT
        self.stages = [0] * len(_STAGES)
        self.fencing = False
        self.ours = False  # we killed it before we learnt of its end
        self.ordered = False  # the fork server has the order to fork it
        self.was_spare = rank is None
        self.watch = 0
        self.eventfd = -1
        self.pidfd = -1
        self.spawned = time.monotonic()
        self.log: WorkerLog | None = None
        self.error: FailureNote | None = None  # describes the exception that ended it

    @property
    def name(self) -> str:
        return f"spare {self.index}" if self.rank is None else f"rank {self.rank}"


class WorkerPool:
    """Holds all worker incarnations of a run; `services` returns the pids of our helpers."""

    def __init__(self, context: LaunchContext, logs: Logs, services: Callable[[], set[int]]) -> None:
        self.workers: dict[int, Worker] = {}
        self.longest_start = 0.0  # seconds that the slowest worker so far took from its fork to its first protected loop
        self.ending = False  # the run ends: from now on we send the signals that kill workers
        self.logs = logs
        self._locked = context.settings.kind != "program"  # a program that replaced the worker's code holds no lock
        self._run_dir = context.run_dir
        self._board = context.board
        self._loop = context.loop
        self._emit = context.listener.on_event
        self._note = context.listener.note
        self._log = context.listener.log
        self._told_of_exec = False
        self._by_pid: dict[int, Worker] = {}
        self._held: list[Died] = []  # peer-loss deaths that wait for the peer's own death
        self._services = services
        self._kills = Kills()

    def living(self) -> list[Worker]:
        """Return the workers that nobody has reaped, also those not forked yet."""
        return [w for w in self.workers.values() if not w.ended]

    def moved(self, pid: int) -> None:
        """Note that a worker moved to another cgroup, which counts its out-of-memory kills from now on."""
        self._kills.watch(pid)

    def expire_kills(self) -> None:
        """Attribute the out-of-memory kills that no worker's death explains to other processes. Call now and then."""
        self._kills.expire()

    # -- birth -------------------------------------------------------------------------------------------------------

    def add(self, index: int, rank: int | None, attempt: int) -> Worker | None:
        """Prepare the cell and pipes of an incarnation before its fork; return None when the fork is already ordered or over.

        Raises:
            IndexError: The board is full.
        """
        worker = self.workers.get(index)
        if worker is None:
            cell = self._board.cell(index)
            native.life_init(cell.field_address(F.LIFE))
            worker = self.workers[index] = Worker(cell, rank)
        elif worker.ordered or worker.ended:
            return None
        worker.ordered = True
        worker.log = self.logs.open(index, self._local(rank), attempt)
        return worker

    def _local(self, rank: int | None) -> int | None:
        return None if rank is None else rank - self.logs.rank_offset

    def order_lost(self, kept: set[int]) -> None:
        """Cancel the fork orders that a dead fork server took and did not answer, and kill its forks. Orders of cells in `kept` stay."""
        known = {w.pid for w in self.living()}
        for worker in self.workers.values():
            if worker.ordered and not worker.pid and not worker.ended and worker.index not in kept:
                worker.ordered = False
        for pid in procfs.children("self"):
            # the fork server forked it just before its own end and did not report its cell
            if pid not in known and pid not in self._services() and fence.is_ours(pid):
                procfs.kill_group(pid)

    def forked(self, index: int, pid: int) -> None:
        """Record that the fork server forked incarnation `index`, and watch the process."""
        worker = self.workers[index]
        worker.spawned = time.monotonic()
        worker.pid = pid
        if worker.log is not None:
            worker.log.pid = pid
        self._by_pid[pid] = worker
        self._kills.watch(pid)
        try:
            worker.pidfd = os.pidfd_open(pid)
        except OSError:
            return  # the process is gone and its exit code is on its way
        self._loop.watch(worker.pidfd, lambda: self._gone(worker))
        if worker.fencing:
            self.fence(index)

    def take_rank(self, index: int, rank: int, attempt: int) -> None:
        """Give `rank` to this incarnation, and its log to that rank's files."""
        worker = self.workers[index]
        if worker.rank != rank:
            worker.rank = rank
            if worker.log is not None:
                worker.log.take_rank(rank - self.logs.rank_offset, attempt)

    # -- the board ---------------------------------------------------------------------------------------------------

    def scan(self) -> None:
        """Emit events for all changes on the board since the last scan."""
        now = time.monotonic()
        for worker in list(self.workers.values()):
            if not worker.ended and not worker.reported:
                self._scan_cell(worker, now)

    def _scan_cell(self, worker: Worker, now: float) -> None:
        # the machine requires this order: milestones, exception, doubts, stages, missing sources, end of the loop
        cell, index = worker.cell, worker.index
        flags = cell[F.FLAGS]
        changed, worker.flags = flags ^ worker.flags, flags
        if changed & flags & Flag.ALIVE:
            if self._locked:
                self._watch_lock(worker)
            self._emit(Started(now, index))
        if changed & flags & Flag.PROTECTED and not worker.was_spare:
            self.longest_start = max(self.longest_start, now - worker.spawned)
        for flag, kind in _MILESTONES:
            if changed & flags & flag:
                self._emit(kind(now, index))
        raised = cell[F.RAISED]
        if raised != worker.raised:
            worker.raised = raised
            self._show_output(worker)
            worker.error = notes.read(FailureNote, self._run_dir, index, raised)
            error = worker.error or FailureNote(index, raised)
            self._emit(Raised(now, index, cell.step or 0, error.signature, raised, error.fault, error.evidence, cell.gate_number))
        doubts = cell[F.INEXACT], cell[F.LEFT_OUT]
        if doubts != worker.doubts:  # before the stage in which it arose: the machine's answer to the stage depends on it
            worker.doubts = doubts
            self._emit(Doubted(now, index, _doubts(*doubts)))
        for at, (field, stage) in enumerate(_STAGES):
            generation = cell[field]
            if generation != worker.stages[at]:
                worker.stages[at] = generation
                self._emit(Stage(now, index, generation, stage))
        no_source = cell[F.NO_SOURCE]
        if no_source != worker.no_source:
            worker.no_source = no_source
            why = notes.read(UnrestorableNote, self._run_dir, index, no_source) or UnrestorableNote(index, no_source)
            self._emit(Unrestorable(now, index, no_source, why.why, why.snapshot, why.requeue))
        unconnected = cell[F.UNCONNECTED]
        if unconnected != worker.unconnected and not self._explained():
            worker.unconnected = unconnected
            told = notes.read(UnconnectedNote, self._run_dir, index, unconnected) or UnconnectedNote(index, unconnected)
            self._emit(Unconnected(now, index, unconnected, Fault.LINK.value, told.evidence))
        if changed & Flag.LOOP_DONE:
            self._emit(LoopDone(now, index, bool(flags & Flag.LOOP_DONE)))

    def _explained(self) -> bool:
        """Is a death about to be reported? A failed connection is reported after it, in a world that is then stopped."""
        return bool(self._held) or any(w.lost and not w.reported for w in self.workers.values())

    def _show_output(self, worker: Worker) -> None:
        """Drain the worker's output, so that a person reads the program's own exception before our message about it."""
        if worker.log is not None:
            worker.log.drain()

    # -- death -------------------------------------------------------------------------------------------------------

    def _watch_lock(self, worker: Worker) -> None:
        if worker.ended or worker.watch:
            return
        worker.eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._loop.watch(worker.eventfd, lambda: self._lock_lost(worker), urgent=True)
        worker.watch = native.watch_start(worker.cell.field_address(F.LIFE), worker.eventfd)

    def _await_lock(self, worker: Worker) -> None:
        """Wait until the restarted interpreter holds the lock again. Until then only its pidfd reveals its end."""
        if worker.cell.has(Flag.HELD_ANEW):
            self._watch_lock(worker)
        elif not worker.ended:
            self._loop.after(_LOCK_LOOK, lambda: self._await_lock(worker))

    def _lock_lost(self, worker: Worker) -> None:
        self._loop.forget(worker.eventfd)
        if worker.cell.has(Flag.ANEW) and not worker.anew:
            worker.anew = True
            self._unwatch(worker)
            self._await_lock(worker)
            return
        worker.lost, worker.ours = True, worker.fencing
        flags = worker.cell[F.FLAGS]
        if flags & Flag.LOOPING and not flags & (Flag.LOOP_DONE | Flag.EXITING) and not worker.reported:
            worker.cell[F.DETECTED_NS] = time.monotonic_ns()
            self.scan()  # progress before the death counts: all ranks may be protected by now
            self._emit(Dying(time.monotonic(), worker.index))
            self._await_code(worker, _CODE_LOOK, time.monotonic() + grace.EXIT_CODE, early=True)
        else:
            expected = self._told_of_exec and worker.rank is None  # a spare runs the same script, so it executes the program too
            self._loop.after(0.0 if expected else _ENDS_SOON, lambda: self._ends_or_goes_on(worker, again=expected))

    def _ends_or_goes_on(self, worker: Worker, again: bool = False) -> None:
        """Tell a process that ends from one that runs another program (exec), of which we see only the end (as with --no-python)."""
        if worker.reported:
            return
        if not fence.lives(worker.pid):
            self._report_later(worker)
            return
        if not again:  # a process that ends looks alive for a moment
            self._loop.after(_LOOK_AGAIN, lambda: self._ends_or_goes_on(worker, again=True))
            return
        self._note("exec", worker=worker.index, rank=worker.rank, pid=worker.pid)
        self._unwatch(worker)
        if worker.rank is None:  # it will never park: the script starts again there, and a spare has no rank to give it
            worker.reported = True
            self._emit(Finished(time.monotonic(), worker.index))
        elif not self._told_of_exec:
            self._told_of_exec = True
            self._log(f"{worker.name} {_EXEC}: {_AFTER_EXEC}", "warning")

    def _await_code(self, worker: Worker, pause: float, latest: float, early: bool = False) -> None:
        """Report the worker's end as soon as its exit code is readable, and at `latest` (monotonic seconds) without a code.

        `early`: nobody has reaped the worker yet. A code that is set is readable, except 0, which looks like no code until the very
        end. A busy machine may run the worker's last thread late.
        """
        if worker.reported:
            return
        code = worker.code if worker.code is not None else fence.peek_exit(worker.pid)
        settled = code is not None or (early and fence.code_is_set(worker.pid))
        if not settled and time.monotonic() < latest:
            self._loop.after(pause, lambda: self._await_code(worker, pause, latest, early))
        elif code is None and early and fence.lives(worker.pid):  # an exec in the loop: its training state is gone
            self.condemn(worker, _EXEC, Fault.EXIT, f"it {_EXEC}")
        else:
            self._report(worker, fence.peek_exit(worker.pid) if code is None else code)

    def _gone(self, worker: Worker) -> None:
        """Expect the exit code of a process that is gone: from the fork server, or from our own wait when that is dead."""
        self._loop.forget(worker.pidfd)
        self._report_later(worker)
        self._loop.after(_CODE_LATEST, lambda: self._never_told(worker))

    def _never_told(self, worker: Worker) -> None:
        """End a worker whose exit code nobody reported: its fork server died after it reaped the worker, and took the code with it.

        A fork server that can neither run nor be killed leaves a zombie, whose code `peek_exit` reads.
        """
        if not worker.ended:
            self.exited(worker.pid, fence.peek_exit(worker.pid))

    def _report_later(self, worker: Worker) -> None:
        """Report the end once the exit code arrives. On a busy machine the fork server, and the process itself, may be slow."""
        latest = time.monotonic() + _CODE_LATEST
        self._loop.after(grace.EXIT_CODE, lambda: self._await_code(worker, _CODE_LATE_LOOK, latest))

    def exited(self, pid: int, code: int | None) -> bool:
        """Record the reaped `pid` with its exit code (None: nobody knows it); return False unless it is a worker not yet recorded."""
        worker = self._by_pid.get(pid)
        if worker is None or worker.ended:
            return False
        worker.code = code
        worker.ended = True
        worker.cell[F.EXIT_STATUS] = code or 0
        worker.cell[F.EXITED] = 1
        if self.ending:
            self._board.ring_workers()  # ends the peers' waits for this rank
        if worker.reported:
            self._note("exit", worker=worker.index, rank=worker.rank, pid=pid, code=code)
        self._scan_cell(worker, time.monotonic())  # its last actions come before its end
        self._report(worker, code)
        self._release(worker)
        self._loop.after(_LEFTOVERS, lambda: self._remove_leftovers(worker))
        if self._over(worker):
            self._fenced(worker, 1)
        elif not worker.fencing:
            self._fence_later(worker, time.monotonic() + _FENCE_DEADLINE)
        return True

    def _report(self, worker: Worker, code: int | None) -> None:
        if worker.reported:
            return
        self.scan()  # progress before the death counts: all ranks may be protected by now
        worker.reported = True
        if not worker.lost:
            worker.ours = worker.fencing
        cell, now = worker.cell, time.monotonic()
        flags = cell[F.FLAGS]
        looping = flags & Flag.LOOPING and not flags & Flag.LOOP_DONE
        if code is None and flags & Flag.EXITING and not (worker.cause or worker.ours or self.ending):
            code = 0  # its script was over and nobody killed it: only the fork server's report is missing
        if code == 0 and not worker.cause and (flags & Flag.EXITING or not looping):
            self._emit(Finished(now, worker.index, bool(cell[F.ENDS])))
            return
        if not cell[F.DETECTED_NS]:
            cell[F.DETECTED_NS] = time.monotonic_ns()
        error = notes.read(FailureNote, self._run_dir, worker.index, cell[F.GENERATION])
        if code not in (None, 1) and error is not None and error.fault != Fault.GAVE_WAY.value:  # it survived that exception
            error = None
        worker.error, told = error, error or FailureNote(worker.index, 0, signature="")
        if error is not None:
            self._show_output(worker)
        age = max(0.0, now - worker.spawned)
        fault, evidence = self._why(worker, code)
        death = Died(
            now,
            worker.index,
            worker.cause or symptoms.cause_of(code),
            code,
            cell.step,
            phase_of(cell),
            told.signature,
            bool(flags & Flag.LOOP_DONE),
            told.final,
            blame.how_far(bool(flags & Flag.SCRIPT), bool(flags & (Flag.GROUP | Flag.STEPPED)), age),
            round(age, 3),
            fault,
            evidence,
            told.outside,
            cell.gate_number,
        )
        if fault == Fault.LINK.value and not (worker.cause or worker.ours or self.ending):
            self._held.append(death)
            if len(self._held) == 1:
                self._await_cause()
        else:
            self._emit(death)
            self._emit_held()

    def _await_cause(self) -> None:
        """Hold back a peer-loss death until the peer's own death is reported: either of two close deaths may be noticed first."""
        if not self._held:
            return
        others = [w for w in self.living() if w.rank is not None and w.pid and not w.reported]
        patience = grace.EXIT_CODE if any(fence.quiet(w.pid) for w in others) else grace.PEERS_DEATH
        if others and time.monotonic() < self._held[0].t + patience:
            self._loop.after(_CAUSE_LOOK, self._await_cause)
        else:
            self._emit_held()

    def _emit_held(self) -> None:
        held, self._held = self._held, []
        for death in held:
            self._emit(death)

    def _why(self, worker: Worker, code: int | None) -> tuple[str, str]:
        """Return the fault behind a death and its evidence; two empty strings for a death that we caused ourselves."""
        if worker.cause:
            return worker.fault.value, worker.evidence
        if worker.error is not None:
            return worker.error.fault, worker.error.evidence
        killed = code is None or code > EXIT_SIGNAL
        if killed and (worker.ours or self.ending):
            return "", ""
        if killed and worker.cell[F.CUT_OFF]:
            return Fault.CUT_OFF.value, "no beat of its node reached the others in time"
        short = self._kills.evidence(worker.pid) if code in (None, EXIT_SIGNAL + signal.SIGKILL) else ""
        if short:
            return Fault.OOM.value, short
        fault, evidence = symptoms.of_code(code)
        return fault.value, evidence

    def _unwatch(self, worker: Worker) -> None:
        """Stop watching the worker's lock: only its end counts from now on."""
        if worker.watch:
            with contextlib.suppress(OSError):
                native.watch_stop(worker.watch)
        worker.watch, worker.lost = 0, False
        if worker.eventfd >= 0:
            self._loop.forget(worker.eventfd)
            os.close(worker.eventfd)
            worker.eventfd = -1

    def _release(self, worker: Worker) -> None:
        self._unwatch(worker)
        if worker.pidfd >= 0:
            self._loop.forget(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = -1
        if worker.pid and worker.code:
            # its children hold sockets of the dead rank; the kernel does not reuse the group's number while one of them lives
            with contextlib.suppress(OSError):
                os.killpg(worker.pid, signal.SIGKILL)

    def _remove_leftovers(self, worker: Worker) -> None:
        """Remove the worker's temporary folder, and the notes that nobody reads any more."""
        shutil.rmtree(paths.temporary_folder(self._run_dir, worker.index), ignore_errors=True)
        notes.remove(ParkedNote, self._run_dir, worker.index)
        notes.remove(WhereNote, self._run_dir, worker.index)

    def condemn(self, worker: Worker, cause: str, fault: Fault, evidence: str) -> None:
        """Report a living process as dead; the machine then orders its fence."""
        worker.cause, worker.fault, worker.evidence = cause, fault, evidence
        self._report(worker, None)

    # -- fence -------------------------------------------------------------------------------------------------------

    def fence(self, index: int) -> None:
        """Kill the incarnation and mark its cell once it runs no more code; continue from the event loop when that takes long."""
        worker = self.workers.get(index)
        if worker is None or worker.cell[F.FENCED]:
            return
        worker.fencing = True
        if worker.ended or not worker.pid:
            if worker.ended and self._over(worker):
                self._fenced(worker, 1)
            return
        procfs.kill_group(worker.pid)
        if not worker.cell[F.DEVICE] and wait_for(lambda: fence.quiet(worker.pid), _FENCE_INLINE, _FENCE_LOOK):
            self._fenced(worker, 1)
        else:
            self._fence_later(worker, time.monotonic() + _FENCE_DEADLINE)

    def dismiss(self, index: int) -> None:
        """Send SIGTERM to a worker; the machine orders a fence when it does not end."""
        worker = self.workers[index]
        worker.fencing = True
        if worker.pid and not worker.ended:
            procfs.kill_group(worker.pid, signal.SIGTERM)
            procfs.kill_group(worker.pid, signal.SIGCONT)  # a frozen worker hears nothing before it is thawed

    def _fence_later(self, worker: Worker, deadline: float) -> None:
        def look() -> None:
            if worker.cell[F.FENCED]:
                return
            if self._over(worker):
                self._fenced(worker, 1)
            elif time.monotonic() > deadline:
                self._fenced(worker, 2)
            else:
                self._fence_later(worker, deadline)

        self._loop.after(_LOOK_GPU if worker.cell[F.DEVICE] else _LOOK, look)

    def _over(self, worker: Worker) -> bool:
        """Can nothing that this worker began change its memory any more?"""
        if worker.cell[F.DEVICE]:
            # a driver may refuse the memory of a process that nobody has reaped yet
            return worker.ended and fence.ended(worker.pid)
        return worker.ended or fence.quiet(worker.pid)

    def _fenced(self, worker: Worker, how: int) -> None:
        if not worker.cell[F.FENCED]:
            worker.cell[F.FENCED_NS] = time.monotonic_ns()
            worker.cell[F.FENCED] = how
            self._board.ring_workers()
            if how == 1 and worker.pid and not worker.ended and not worker.cell[F.DEVICE]:
                fence.step_aside(worker.pid)


def _doubts(inexact: int, left_out: int) -> str:
    """Format F.INEXACT and F.LEFT_OUT for the journal."""
    flags = [str(flag.name).lower().replace("_", " ") for flag in Inexact if flag & inexact]
    return ", ".join([*flags, *([f"{left_out} not kept"] if left_out else [])])
