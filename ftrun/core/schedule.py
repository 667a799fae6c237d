"""A shorter time slice for threads that must run at once when a worker died, however busy the cores are.

Since Linux 6.12 a thread may ask for its own slice without any privilege: it gets the same share of the processor in
smaller pieces, and is scheduled sooner when it wakes. On older kernels the request changes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct

_SHORT_NS = 100_000  # the smallest slice that the kernel gives
_libc = ctypes.CDLL(None, use_errno=True)
_SYSCALL = {"x86_64": 314, "aarch64": 274}


def shorten_slice() -> bool:
    """For the calling thread and the threads it starts from now on. False when the system has no such thing."""
    return _set_slice(_SHORT_NS)


def reset_slice(thread: int = 0) -> None:
    """Back to the system's slice, in a thread that has (or inherited) a short one. By its number; 0 = the calling one."""
    with contextlib.suppress(OSError):  # it ended
        _set_slice(0, thread)


def _set_slice(nanoseconds: int, thread: int = 0) -> bool:
    number = _SYSCALL.get(platform.machine())
    if number is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, thread)
    # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
    attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0)
    return bool(_libc.syscall(number, thread, attributes, 0) == 0)
