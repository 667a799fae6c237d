"""Memory on a GPU that a worker reads for others: what the fd store makes of its answers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

import pytest

from ftrun.core.shared import wire
from ftrun.helpers.gpu_reads import GpuReads

SIZE = 1 << 16  # of the buffer


class Worker:
    """Answers as the function says, which gets the buffer's descriptor, the offset and the size."""

    def __init__(self, answer: Callable[[int, int, int], bool]) -> None:
        self.fd = os.memfd_create("ftrun-test-reads")
        os.truncate(self.fd, SIZE)
        ours, self.sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.reads = GpuReads(ours, os.dup(self.fd), 1 << 40)
        self._answer = answer
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        with self.sock, contextlib.suppress(OSError):  # it hung up meanwhile
            while (frame := wire.receive(self.sock)) is not None:
                wire.send(self.sock, {"ok": self._answer(self.fd, frame[0]["at"], frame[0]["size"])})

    def end(self) -> None:
        self.reads.end()
        self.thread.join(10.0)
        assert not self.thread.is_alive() and self.reads.over()
        os.close(self.fd)


def test_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    worker = Worker(lambda fd, at, size: True)
    assert worker.reads.read(memoryview(bytearray(8)), 0) == 8
    worker.end()
    worker.reads.end()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_reader_that_waits_does_not_keep_the_end_waiting() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def never(fd: int, at: int, size: int) -> bool:
        asked.set()
        return go_on.wait(20.0)

    worker = Worker(never)
    failed: list[OSError] = []

    def read() -> None:
        try:
            worker.reads.read(memoryview(bytearray(8)), 0)
        except OSError as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert asked.wait(10.0)
    worker.reads.end()
    reader.join(5.0)
    assert not reader.is_alive() and failed and worker.reads.over()
    go_on.set()
    worker.thread.join(10.0)
    os.close(worker.fd)


def test_each_read_gives_what_the_worker_copied() -> None:
    def fill(fd: int, at: int, size: int) -> bool:
        return os.pwrite(fd, bytes([at % 251]) * size, 0) == size

    worker = Worker(fill)
    room = bytearray(3 * SIZE)
    assert worker.reads.read(memoryview(room), 5) == SIZE, "no more than fits the buffer"
    assert worker.reads.read(memoryview(room)[:100], 250) == 100
    assert room == bytes([250]) * 100 + bytes([5]) * (SIZE - 100) + bytes(2 * SIZE)
    assert not worker.reads.over()
    worker.end()


def test_a_device_that_gives_nothing() -> None:
    worker = Worker(lambda fd, at, size: at == 0)
    with pytest.raises(OSError, match="did not read its device"):
        worker.reads.read(memoryview(bytearray(8)), 8)
    assert worker.reads.read(memoryview(bytearray(8)), 0) == 8 and not worker.reads.over()
    worker.end()


def test_a_worker_that_dies() -> None:
    worker = Worker(lambda fd, at, size: True)
    worker.sock.shutdown(socket.SHUT_RDWR)
    worker.thread.join(10.0)
    assert worker.reads.over()
    with pytest.raises(OSError):
        worker.reads.read(memoryview(bytearray(8)), 0)
