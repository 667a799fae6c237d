"""Read this worker's memory on a GPU for replacements on other nodes, in a thread that the fd store asks (ftrun/helpers/gpu_reads.py).

The thread copies by streams of its own: the script's streams may hold kernels that wait for the very rank that is being replaced. For the
same reason it makes all that a copy needs beforehand: the driver makes nothing while such a kernel runs. What a reader uses was whole
before it asked: it knows that from the commit mark, which the device wrote behind the update.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
import time

from ftrun.core.errors import PlatformError
from ftrun.core.shared import far, wire
from ftrun.native import cuda, transfer
from ftrun.native.transfer import CHECK_BACK, Terms
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.gpu_memory import WAIT, DeviceMemory, zones_of
from ftrun.worker.memory.segment import Segment

_AGAIN = 0.2  # seconds after which a reader looks for an fd store again
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


class Buffer:
    """Host memory that a device and the fd store see, too. Copies into it take turns.

    Raises:
        PlatformError: By the constructor: the system gives none.
    """

    def __init__(self, rank: int) -> None:
        self.segment = Segment.create(f"reads-{rank}", far.CHUNK)
        self._seen = 0  # as the device sees it
        self._lock = threading.Lock()

    def prepare(self, ordinal: int) -> None:
        """Make what copies from a device need, and try one. Raises OSError."""
        with self._lock:
            if not self._seen:
                cuda.load_kernels(ordinal)
                self._seen = cuda.register(ordinal, self.segment.address, self.segment.length)
            self._copy(ordinal, self._seen + self.segment.length // 2, 64)

    def read(self, memory: DeviceMemory, at: int, size: int) -> None:
        """Copy a part of the memory, and compare.

        Raises:
            OSError: It has no such part, or the device failed.
        """
        if not any(start <= at and at + size <= start + length for start, length in zones_of(memory.control)):
            raise OSError(f"it has no {size} bytes at {at}")
        with self._lock:
            self._copy(memory.ordinal, memory.base + at, size)

    def _copy(self, ordinal: int, source: int, size: int) -> None:
        transfer.copy([(self._seen, size)], [(source, size)], Terms(check=CHECK_BACK, timeout=WAIT), ordinal)


class GpuReader:
    """Lets the fd store of this node ask, and each one that comes after it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._memory: DeviceMemory | None = None
        self._buffer: Buffer | None = None

    def offer(self, memory: DeviceMemory) -> None:
        """Offer this memory from now on, and no other, if there are several nodes."""
        world = self._context.world
        if world is not None and world.span is not None and memory is not self._memory:
            self._memory = memory
            threading.Thread(target=self._run, args=(memory,), name="ftrun-reads", daemon=True).start()

    def _run(self, memory: DeviceMemory) -> None:
        # a signal that the script blocks, to wait for it, must not end the process through this thread
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
        context = self._context
        try:
            self._buffer = buffer = self._buffer or Buffer(context.rank)
            buffer.prepare(memory.ordinal)
        except (OSError, PlatformError) as error:
            _say(context.rank, memory, error)
            return
        while self._memory is memory:
            with contextlib.suppress(OSError):
                sock = context.fd_store.lend_reads(context.rank, context.cell.index, buffer.segment.fd, memory.length)
                serve(sock, memory, buffer, context.rank)
            time.sleep(_AGAIN)


def serve(sock: socket.socket, memory: DeviceMemory, buffer: Buffer, rank: int) -> None:
    """Answer the fd store until it hangs up. Raises OSError."""
    with sock:
        while (frame := wire.receive(sock)) is not None:
            why = None
            try:
                buffer.read(memory, int(frame[0]["at"]), int(frame[0]["size"]))
            except OSError as error:  # of the device, too
                why = error
            wire.send(sock, {"ok": why is None})
            if why is not None:
                _say(rank, memory, why)


def _say(rank: int, memory: DeviceMemory, why: Exception) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it, or the script has closed it
        print(f"ftrun: rank {rank}: its memory on device {memory.ordinal} cannot be read for another node: {why}", file=sys.stderr)
