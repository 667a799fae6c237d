"""The thread that hears the doorbell of a worker. It never decides anything.

When the generation grows, it wakes the training thread out of whatever it waits in (groups register a waker), and answers
"stopped" for a thread that is outside a step body. It also wakes the thread at the end of the run, once a rank has left: Python
handles the signal that ends the run only when the main thread returns to Python code.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from ftrun.core.shared import gate
from ftrun.core.shared.board import F, Head
from ftrun.worker.link.position import Interrupt
from ftrun.worker.link.run_link import LOOK_AGAIN, LOOK_RARELY, Context
from ftrun.worker.link.stack_sampler import Whereabouts
from ftrun.worker.torch_compat.torch_private import interrupt_thread

_COMPLETE_AFTER = 0.004  # seconds that an aborted collective gets to end by itself
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


class ControlThread:
    """One per worker process."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._position = context.position
        self._heard = 0
        self._cut_short = False
        self._fd_store_epoch = self._lent_epoch = context.mapped_epoch

    def start(self) -> None:
        threading.Thread(target=self._listen, name="ftrun-control", daemon=True).start()

    def _listen(self) -> None:
        # a signal that the script blocks, to wait for it, must not end the process through this thread
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
        context = self._context
        where = Whereabouts(context)
        while True:
            seen = context.board.worker_bell.count()
            context.cell[F.PYTHON] = time.monotonic_ns()
            try:
                where.look()
                self._hear()
            except Exception as error:  # the thread must live: it is the only one that can wake the training thread
                os.write(2, f"ftrun: control thread: {error!r}\n".encode())
            context.board.worker_bell.wait(seen, LOOK_AGAIN if context.cell[F.RANK] else LOOK_RARELY)

    def _hear(self) -> None:
        context, position = self._context, self._position
        epoch = context.board[Head.FD_STORE_EPOCH]
        if epoch != self._lent_epoch and context.lent.again():
            self._lent_epoch = epoch
        if epoch != self._fd_store_epoch and (context.on_fd_store is None or context.on_fd_store()):
            self._fd_store_epoch = epoch
        if not self._cut_short and (why := context.cut_short()):
            self._cut_short = True
            for waker in list(context.wakers):
                waker.cut_short(why)
        if context.world is None or not context.stop_pending():
            return
        generation = gate.unpack(context.board.gate()).generation
        if generation == self._heard:
            return
        self._heard = generation
        for waker in list(context.wakers):
            waker.abort(generation)
        with position.lock:
            if not position.in_body and context.cell[F.STOPPED] < generation:
                context.answer(F.STOPPED, generation)
        time.sleep(_COMPLETE_AFTER)
        for waker in list(context.wakers):
            waker.release(generation)
        if position.interruptible:
            threading.Thread(target=self._insist, args=(generation,), daemon=True).start()

    def _insist(self, generation: int) -> None:
        """Interrupt, as a last resort, a training thread that is busy in Python and calls no function of ftrun."""
        context, position = self._context, self._position
        deadline = time.monotonic() + context.stop_timeout / 2
        while time.monotonic() < deadline:
            if context.generation >= generation or not position.interruptible:
                return
            seen = context.board.worker_bell.count()
            context.board.worker_bell.wait(seen, min(0.05, max(0.0, deadline - time.monotonic())))
        with position.lock:
            if position.interruptible and context.stop_pending() and position.thread.is_alive():
                position.interrupt_sent = True
                interrupt_thread(position.thread.ident or 0, Interrupt)
