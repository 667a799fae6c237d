"""Read this worker's memory on a GPU for replacements on other nodes, in a thread that the fd store asks (ftrun/helpers/gpu_reads.py).

The thread copies by streams of its own: the script's streams may hold kernels that wait for the very rank that is being replaced. What a
reader uses was whole before it asked: it knows that from the commit mark, which the device wrote behind the update.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading

from ftrun.core.shared import far, wire
from ftrun.core.shared.board import Head
from ftrun.native import cuda, transfer
from ftrun.native.transfer import CHECK_BACK, Terms
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.gpu_memory import WAIT, DeviceMemory, zones_of
from ftrun.worker.memory.segment import Segment


class GpuReader:
    """What one worker offers to read."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Lock()  # the control thread offers it again when there is another fd store
        self._sock: socket.socket | None = None
        self._offered: tuple[DeviceMemory, int] | None = None  # the memory, and which fd store knows of it

    def offer(self, memory: DeviceMemory) -> None:
        """Let the fd store ask for parts of this memory from now on, if there are several nodes. Call it again at any time.

        Raises:
            OSError: There is no fd store now.
            PlatformError: The system gives no shared memory.
        """
        context = self._context
        with self._lock:
            offered = memory, context.board[Head.FD_STORE_EPOCH]
            if context.world is None or context.world.span is None or offered == self._offered:
                return
            buffer = Segment.create(f"reads-{context.rank}", far.CHUNK)
            sock = context.fd_store.lend_reads(context.rank, context.cell.index, buffer.fd, memory.length)
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)  # the thread that reads the earlier memory ends
            self._sock, self._offered = sock, offered
        told = sock, memory, buffer, context.rank
        threading.Thread(target=serve, args=told, name="ftrun-reads", daemon=True).start()


def serve(sock: socket.socket, memory: DeviceMemory, buffer: Segment, rank: int) -> None:
    """Answer the fd store until it hangs up."""
    seen = 0  # the buffer as the device sees it
    with sock, contextlib.suppress(OSError):
        while (frame := wire.receive(sock)) is not None:
            at, size = int(frame[0]["at"]), int(frame[0]["size"])
            try:
                seen = seen or cuda.register(memory.ordinal, buffer.address, buffer.length)
                _read(memory, at, size, seen)
                wire.send(sock, {"ok": True})
            except OSError as error:  # of the device, too
                what = f"its memory on device {memory.ordinal} cannot be read for another node"
                print(f"ftrun: rank {rank}: {what}: {error}", file=sys.stderr)
                wire.send(sock, {"ok": False})
    if seen:
        with contextlib.suppress(OSError):
            cuda.unregister(memory.ordinal, buffer.address)
    buffer.close()


def _read(memory: DeviceMemory, at: int, size: int, to: int) -> None:
    """Copy a part of the memory to an address of the device, and compare.

    Raises:
        OSError: It has no such part, or the device failed.
    """
    if not any(start <= at and at + size <= start + length for start, length in zones_of(memory.control)):
        raise OSError(f"it has no {size} bytes at {at}")
    transfer.copy([(to, size)], [(memory.base + at, size)], Terms(check=CHECK_BACK, timeout=WAIT), memory.ordinal)
