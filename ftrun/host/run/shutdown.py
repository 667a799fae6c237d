"""Ends the workers: sends one signal to each rank, gives it time to clean up, then sends SIGKILL.

Every end of a run goes through here: after a worker's failure, a signal, or a repair that ran out of means. Spares have
nothing to clean up and get SIGKILL at once. This file decides nothing: the machine orders the end.
"""

from __future__ import annotations

import signal
import time

from ftrun.core.shared.board import Head
from ftrun.core.system import procfs
from ftrun.core.text import ranks
from ftrun.host.base.context import LaunchContext
from ftrun.host.workers.pool import Worker, WorkerPool

# Seconds. Ranks that fail together (one bug, or a group closed in a `finally`) report within this time; an earlier signal
# of ours could cut off the one that has the cause.
SETTLE = 0.25
SAME_SIGNAL = 0.05  # seconds; a wrapper (uv run, srun) passes on the Ctrl-C that the terminal sent to both of us


class Ending:
    """Ends the workers of one run."""

    def __init__(self, context: LaunchContext, pool: WorkerPool) -> None:
        self._pool = pool
        self._board = context.board
        self._loop = context.loop
        self._timeout = context.settings.shutdown_timeout  # seconds between the signal and SIGKILL
        self._listener = context.listener
        self._signals: list[tuple[int, float]] = []
        self.began = 0.0  # unix time of the signal to the ranks; 0 = none got one
        self.signum: int = signal.SIGKILL  # the signal that the ranks got, if they got one
        self.killed: list[int] = []  # ranks that got SIGKILL after the timeout

    def got(self, signum: int) -> bool:
        """Record a signal that ends the run; return False when it only echoes the one before."""
        now = time.monotonic()
        echo = bool(self._signals) and self._signals[-1][0] == signum and now - self._signals[-1][1] < SAME_SIGNAL
        self._signals.append((signum, now))
        return not echo

    def terminate(self, failed: bool) -> None:
        """Begin to end every worker; the caller's loop goes on until they are gone. `failed`: see `events.Terminate`."""
        self._pool.ending = True
        for worker in self._pool.living():
            if worker.pid and worker.rank is None:
                worker.fencing = True  # a world published just now may already include it: its end is our doing
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
            1  # after the signals: this word makes ranks abort a collective, and the signal has to arrive first
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
