"""Passes signals on to the training processes, without any other effect (--forward-signals).

A signal goes to the main process of each rank, not to its children. The forwarder holds it back while that process would die
of it: before the script calls `signal.signal`, or while a replacement starts. Spares get no signal.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import time

from ftrun.core.amounts import count
from ftrun.core.system import procfs
from ftrun.core.text import ranks
from ftrun.host.base.context import LaunchContext
from ftrun.host.workers.pool import WorkerPool

PATIENCE = 60.0  # seconds that a rank has to install a handler before the forwarder drops the signal
_LOOK = 0.1
_HARMLESS = (signal.SIGCONT, signal.SIGURG, signal.SIGWINCH)  # ignored unless handled


class Forwarder:
    """Forwards the signals of one run."""

    def __init__(self, context: LaunchContext, pool: WorkerPool) -> None:
        self._pool = pool
        self._loop = context.loop
        self._nproc = context.settings.nproc
        self._listener = context.listener
        self._waiting: dict[int, tuple[set[int], float]] = {}  # signal -> (ranks that got it, until when)
        self._blocked: set[tuple[int, int]] = set()  # (process, signal) as of the last look
        self._looking = False

    def forward(self, signum: int) -> None:
        """Send `signum` to every rank of this node, now or as soon as the rank handles it."""
        self._waiting[signum] = (set(), time.monotonic() + PATIENCE)
        name = signal.Signals(signum).name
        sent = self._deliver(signum)
        self._listener.note("forwarded", signal=name, ranks=sent)
        missing = self._nproc - len(sent)
        if missing:
            self._listener.log(
                f"got {name}; {count(missing, 'worker')} of {self._nproc} will get it once it is handled there"
            )
            self._look_later()
        else:
            self._listener.log(f"got {name}; passed on to {ranks(sent)}")
            del self._waiting[signum]

    def _look_later(self) -> None:
        if self._waiting and not self._looking:
            self._looking = True
            self._loop.after(_LOOK, self._look)

    def _look(self) -> None:
        self._looking = False
        for signum, (got, until) in list(self._waiting.items()):
            name = signal.Signals(signum).name
            sent = self._deliver(signum)
            if sent:
                self._listener.note("forwarded", signal=name, ranks=sent)
            if len(got) >= self._nproc:
                del self._waiting[signum]
            elif time.monotonic() > until:
                del self._waiting[signum]
                missing = count(self._nproc - len(got), "worker")
                why = "not handled there, it would have ended the process"
                self._listener.log(f"{name} was not passed on to {missing}: {why}", "warning")
        self._look_later()

    def _deliver(self, signum: int) -> list[int]:
        got, _ = self._waiting[signum]
        sent = []
        for worker in self._pool.living():
            if worker.rank is None or not worker.pid or worker.reported or worker.rank in got:
                continue
            if self._takes(worker.pid, signum):
                with contextlib.suppress(OSError):
                    os.kill(worker.pid, signum)
                sent.append(worker.rank)
        got.update(sent)
        return sorted(sent)

    def _takes(self, pid: int, signum: int) -> bool:
        answer = answer_of(pid, signum)
        before = (pid, signum) in self._blocked
        (self._blocked.add if answer is SignalAnswer.BLOCKED else self._blocked.discard)((pid, signum))
        # a process blocks all signals for a moment while it starts a child
        return answer is SignalAnswer.TAKEN or (answer is SignalAnswer.BLOCKED and before)


class SignalAnswer(enum.Enum):
    """The answer of a process to a signal."""

    TAKEN = "handles or ignores it"
    BLOCKED = "holds it back, to wait for it or only for now"
    DIES = "ends, or is gone"


def answer_of(pid: int, signum: int) -> SignalAnswer:
    """Return the answer that the process would give to the signal now."""
    if signum in _HARMLESS:
        return SignalAnswer.TAKEN
    threads = [procfs.status(pid, task) for task in procfs.tasks(pid)]

    def in_all(name: str) -> bool:
        return bool(threads) and all(int(fields.get(name, "0"), 16) >> (signum - 1) & 1 for fields in threads)

    if in_all("SigCgt") or in_all("SigIgn"):
        return SignalAnswer.TAKEN
    return (
        SignalAnswer.BLOCKED if in_all("SigBlk") else SignalAnswer.DIES
    )  # otherwise a thread that does not block the signal takes it
