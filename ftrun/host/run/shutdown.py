"""Ends workers: one signal to each, time to clean up, SIGKILL for those that do not use it.

Every end of a run goes through here, whether a worker failed, a signal came or nothing is left to repair with. Spares
have nothing to clean up and are killed at once. Decides nothing: the machine says when.
"""

from __future__ import annotations

import signal
import time

from ftrun.core.shared.board import Head
from ftrun.core.system import procfs
from ftrun.core.text import ranks
from ftrun.host.base.context import LaunchContext
from ftrun.host.workers.pool import Worker, WorkerPool

# Ranks that fail together (one bug, or a group closed in a `finally`) report within this time: the cause is among them
# only if they are not cut off by our own signal first.
SETTLE = 0.25
SAME_SIGNAL = 0.05  # seconds; a wrapper (uv run, srun) passes on the Ctrl-C that the terminal sent to both


class Ending:
    """The end of one run."""

    def __init__(self, context: LaunchContext, pool: WorkerPool) -> None:
        self._pool = pool
        self._board = context.board
        self._loop = context.loop
        self._timeout = context.settings.shutdown_timeout  # seconds that workers get between the signal and SIGKILL
        self._listener = context.listener
        self._signals: list[tuple[int, float]] = []
        self.began = 0.0  # unix time at which workers were told to end; 0 = none was
        self.signum: int = signal.SIGKILL  # what they were told, if they were
        self.killed: list[int] = []  # ranks that had to be killed

    def got(self, signum: int) -> bool:
        """The launcher got an ending signal; False when it is the echo of the one before."""
        now = time.monotonic()
        echo = bool(self._signals) and self._signals[-1][0] == signum and now - self._signals[-1][1] < SAME_SIGNAL
        self._signals.append((signum, now))
        return not echo

    def terminate(self, failed: bool) -> None:
        """End every worker; the caller's loop goes on until they are gone. `failed`: see Terminate."""
        self._pool.ending = True
        for worker in self._pool.living():
            if worker.pid and worker.rank is None:
                worker.fencing = True  # a world that was just published may count it in already: its end is our doing
                procfs.kill_group(worker.pid)
        if self._signals or not failed or not self._ranked():
            self._signal_all()
        else:
            self._loop.after(SETTLE, self._signal_all)

    def _signal_all(self) -> None:
        if self.began:
            return
        told = self._ranked()
        if told:
            self.began = time.time()
            self.signum = self._signals[0][0] if self._signals else signal.SIGTERM
        for worker in told:
            procfs.kill_group(worker.pid, self.signum)
            procfs.kill_group(worker.pid, signal.SIGCONT)  # a frozen worker hears nothing before it is thawed
        self._board[Head.ENDING] = (
            1  # after the signals: ranks cut a collective short by this, and are to find theirs first
        )
        self._board.ring_workers()
        if told:
            self._listener.note("told-to-end", signal=signal.Signals(self.signum).name, ranks=[w.rank for w in told])
            self._loop.after(self._timeout, self._kill)

    def _kill(self) -> None:
        stubborn = self._ranked()
        for worker in stubborn:
            procfs.kill_group(worker.pid)
        self.killed = sorted(w.rank for w in stubborn if w.rank is not None)
        if self.killed:
            name = signal.Signals(self.signum).name
            self._listener.note("killed", ranks=self.killed, after=self._timeout)
            self._listener.log(
                f"{ranks(self.killed)} did not end within {self._timeout:g} s of {name}; killed", "warning"
            )

    def _ranked(self) -> list[Worker]:
        return [w for w in self._pool.living() if w.pid and w.rank is not None]
