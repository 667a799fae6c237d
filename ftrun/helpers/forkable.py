"""Checks whether the fork server may still be forked: an import may have left state in it that no forked worker can use.

torch refuses a backward in the child of a process in which autograd has started its device threads, and CUDA does not work in
the child of a process that has initialized its driver. The number of threads tells nothing: numpy's OpenBLAS starts one per core.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_AUTOGRAD = "pt_autograd_"  # prefix of the names of autograd's device threads
_DRIVER = "libcuda.so.1"
_SUCCESS = 0  # before cuInit every driver call returns CUDA_ERROR_NOT_INITIALIZED, and a stub always returns an error


def obstacle() -> str:
    """Return the obstacle to a fork of this process, in words that follow "it"; "" if there is none."""
    if _runs_autograd():
        return "started autograd's threads, which a forked process would lack (some code there ran a backward)"
    if _driver_is_initialized():
        return "initialized the CUDA driver, which a forked process cannot use (some code there called CUDA)"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "initialized CUDA in torch, which a forked process cannot use"
    return ""


def _runs_autograd() -> bool:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread ended
            if (task / "comm").read_text().startswith(_AUTOGRAD):
                return True
    return False


def _driver_is_initialized() -> bool:
    """Is the CUDA driver initialized? Asks only a driver that is loaded already, and makes no call that initializes it."""
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        count = driver.cuDeviceGetCount
    except (OSError, AttributeError):
        return False
    return int(count(ctypes.byref(ctypes.c_int()))) == _SUCCESS


def leave() -> None:
    """Leave the fork server's session and signal handlers; a forked child calls this first."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
