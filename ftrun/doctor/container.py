"""Tries the kernel features that ftrun uses, since the seccomp profile of a container may forbid some."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ftrun import native
from ftrun.doctor.findings import BROKEN, OK, WARNING, Finding

AREA = "container"
_FIX = "allow it in the container's seccomp profile (docker run --security-opt seccomp=FILE)"
_WAIT_MS = 2000


def check() -> Iterator[Finding]:
    tries: tuple[tuple[str, Callable[[], str], str], ...] = (
        ("pidfd", _pidfd, _FIX),
        ("memfd", _memfd, _FIX),
        ("SCM_RIGHTS", _descriptors, _FIX),
        ("robust futex", _robust, _FIX),
        ("/proc", _proc, "mount /proc, without hidepid=2"),
    )
    for name, attempt, fix in tries:
        if name == "robust futex" and not native.available():
            yield Finding(AREA, name, WARNING, "not tried: it needs the native library")
            continue
        try:
            yield Finding(AREA, name, OK, attempt())
        except (OSError, TimeoutError) as error:
            yield Finding(AREA, name, BROKEN, str(error), fix)
    yield _processes()


@contextlib.contextmanager
def _child(work: Callable[[], None]) -> Iterator[int]:
    """Fork a process that does `work`, reports it, and waits; yield its pid, and kill it at the end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os.write(writer, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        if os.read(reader, 1) != b"x":
            raise OSError("a child process could not do its part")
        yield pid
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _wait_readable(fd: int, what: str) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if not poll.poll(_WAIT_MS):
        raise TimeoutError(f"{what} within {_WAIT_MS // 1000} s")


def _pidfd() -> str:
    with _child(lambda: None) as pid:
        fd = os.pidfd_open(pid)
        try:
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            _wait_readable(fd, "the death of a process was not told")
            return f"a death is told after {(time.monotonic() - began) * 1e3:.1f} ms"
        finally:
            os.close(fd)


def _memfd() -> str:
    fd = os.memfd_create("ftrun-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 1 << 40)  # a segment has its largest size from the start, and takes memory when it is written
        with mmap.mmap(fd, 4096) as memory:
            memory[:5] = b"ftrun"
        return "shared memory without a name, 1 TiB sparse"
    finally:
        os.close(fd)


def _descriptors() -> str:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = os.memfd_create("ftrun-doctor", os.MFD_CLOEXEC)
    with left, right:
        try:
            socket.send_fds(left, [b"x"], [fd])
            _, received, _, _ = socket.recv_fds(right, 1, 1)
        finally:
            os.close(fd)
    for copy in received:
        os.close(copy)
    if len(received) != 1:
        raise OSError("a descriptor sent to another process did not arrive")
    return "descriptors can be handed over"


def _robust() -> str:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        place = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(place)
        event = os.eventfd(0)
        try:
            native.life_init(address)
            with _child(lambda: native.life_hold(address)) as pid:
                handle = native.watch_start(address, event)
                try:
                    began = time.monotonic()
                    os.kill(pid, signal.SIGKILL)
                    _wait_readable(event, "the kernel did not release a dead process's lock")
                    taken = (time.monotonic() - began) * 1e3
                finally:
                    native.watch_stop(handle, wait=True)
            return f"a dead worker's lock is released after {taken:.1f} ms"
        finally:
            os.close(event)
            del place


def _proc() -> str:
    with _child(lambda: None) as pid:
        if not list(Path(f"/proc/{pid}/task").glob("*/stat")):
            raise OSError("other processes of this user are not shown")
    return "shows this user's processes"


def _processes() -> Finding:
    limits = [Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids/pids.max")]
    texts = [path.read_text().strip() for path in limits if path.is_file()]
    counts = [int(text) for text in texts if text.isdigit()]
    if counts and min(counts) < 1024:
        return Finding(
            AREA,
            "processes",
            WARNING,
            f"at most {min(counts)} (cgroup)",
            "raise it: docker run --pids-limit 4096; torch makes many threads",
        )
    return Finding(AREA, "processes", OK, f"at most {min(counts)} (cgroup)" if counts else "no limit (cgroup)")
