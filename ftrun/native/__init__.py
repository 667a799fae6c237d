"""ctypes binding of libftrun_native: words, bells, liveness locks, mappings, copies. Twin of native/include/ftrun_native.h.

This file holds no logic beyond turning negative errno results into OSError. Addresses are ints in this process; nothing
here keeps memory alive, so whoever maps or allocates must outlive every use. Importing never fails: without the
library each function raises PlatformError when it is called.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import c_bool, c_double, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

LIFE_BYTES = 64
SLOT_HEADER = 64  # bytes before a slot's content
_ABI_VERSION = 11
_LIBRARY = Path(__file__).with_name("libftrun_native.so")


def _load(kind: type[ctypes.CDLL]) -> tuple[ctypes.CDLL | None, str]:
    try:
        library = kind(os.fspath(_LIBRARY))
    except OSError as error:
        return None, str(error)
    found = library.ftrun_abi_version()
    if found != _ABI_VERSION:
        return None, f"{_LIBRARY} has interface version {found}, wanted {_ABI_VERSION}"
    return library, ""


# CDLL gives up the GIL around a call: right for what may sleep or take long. For a call of a few nanoseconds it would
# invite another thread to take the GIL for a whole switch interval, so these keep it.
_releasing, _why = _load(ctypes.CDLL)
_holding, _ = _load(ctypes.PyDLL)


def available() -> bool:
    """Whether the native library was found and fits."""
    return _releasing is not None


def _missing(*_: object) -> Any:
    from ftrun.core.errors import PlatformError

    raise PlatformError(
        f"ftrun's native library cannot be used ({_why}): install a C++17 compiler and reinstall ftrun; "
        "in a source checkout run: make native",
        explain="F202",
    )


def _bind(library: ctypes.CDLL | None, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    if library is None:
        return _missing
    function = library["ftrun_" + name]
    function.restype, function.argtypes = result, arguments
    return function


def _check(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


# ---- words and bells. Hot: the ctypes functions themselves, no Python around them. ----

load64: Callable[[int], int] = _bind(_holding, "load64", c_uint64, c_void_p)
"""load64(address) -> the 64-bit word there (acquire)."""

load32: Callable[[int], int] = _bind(_holding, "load32", c_uint32, c_void_p)
"""load32(address) -> the 32-bit word there (acquire)."""

store64: Callable[[int, int], None] = _bind(_holding, "store64", None, c_void_p, c_uint64)
"""store64(address, value): writes a 64-bit word (release)."""

cas64: Callable[[int, int, int], int] = _bind(_holding, "cas64", c_uint64, c_void_p, c_uint64, c_uint64)
"""cas64(address, expected, desired) -> the previous word; swapped iff it equals `expected`."""

bell_ring: Callable[[int], None] = _bind(_holding, "bell_ring", None, c_void_p)
"""bell_ring(address): adds one to the 32-bit bell and wakes every waiter in every process."""

bell_wait: Callable[[int, int, float], bool] = _bind(_releasing, "bell_wait", c_bool, c_void_p, c_uint32, c_double)
"""bell_wait(address, seen, timeout seconds) -> True = the count differs from `seen`.

False after the timeout, or early when a signal came, so that Python can run its handlers: look again in a loop.
"""


slot_write: Callable[[int, bytes, int, int], None] = _bind(
    _releasing, "slot_write", None, c_void_p, ctypes.c_char_p, c_size_t, c_uint64
)
"""slot_write(slot address, data, length, tag): replaces a slot's content and seals it."""


class AddressList:
    """A fixed list of addresses of 64-bit words, laid out once for `all_equal64` and `arrive`."""

    __slots__ = ("_as_parameter_",)

    def __init__(self, addresses: Sequence[int]) -> None:
        self._as_parameter_ = (c_uint64 * (len(addresses) + 1))(len(addresses), *addresses)

    def __len__(self) -> int:
        return int(self._as_parameter_[0])


all_equal64: Callable[[AddressList, int], bool] = _bind(_holding, "all_equal64", c_bool, c_void_p, c_uint64)
"""all_equal64(addresses, value) -> whether each word (acquire) equals `value`; True for an empty list."""

arrive: Callable[[int, int, AddressList], bool] = _bind(_holding, "arrive", c_bool, c_void_p, c_uint64, c_void_p)
"""arrive(address, value, addresses): writes a word, then `all_equal64`. Of all that arrive at least one gets True."""


# ---- liveness locks ----

_life_init = _bind(_releasing, "life_init", c_int, c_void_p)
_life_hold = _bind(_releasing, "life_hold", c_int, c_void_p)
_life_release = _bind(_releasing, "life_release", c_int, c_void_p)
_beat_start = _bind(_releasing, "beat_start", c_int, c_void_p, c_void_p, c_double, c_int, c_double)
_beat_stop = _bind(_releasing, "beat_stop", c_int)
_watch_start = _bind(_releasing, "watch_start", c_int64, c_void_p, c_int)
_watch_stop = _bind(_releasing, "watch_stop", c_int, c_int64, c_bool)


def life_init(address: int) -> None:
    """Prepare a robust process-shared mutex in the LIFE_BYTES at `address`, before anybody uses it."""
    _check(_life_init(address))


def life_hold(address: int) -> None:
    """Lock it for the calling thread until that thread ends.

    Raises:
        OSError: EBUSY when it is taken.

    The memory must stay mapped for as long as the lock is held.
    """
    _check(_life_hold(address))


def life_release(address: int) -> None:
    """Unlock it in the thread that holds it.

    Raises:
        OSError: EPERM when the caller does not.
    """
    _check(_life_release(address))


def beat_start(life_address: int, beat_address: int, interval: float, launcher_pid: int, orphan_grace: float) -> None:
    """Start the beat thread of this process; returns once it holds the liveness lock.

    It stores CLOCK_MONOTONIC ns to `beat_address` at each multiple of `interval` seconds. When process `launcher_pid` has been dead
    for `orphan_grace` seconds it kills this process, with its whole process group if it leads one (0 = never).

    Raises:
        OSError: EBUSY if the lock is taken, EALREADY if the thread runs.
    """
    _check(_beat_start(life_address, beat_address, interval, launcher_pid, orphan_grace))


def beat_stop() -> None:
    """End the beat thread and unlock the liveness lock. Nothing happens when there is none, as in a forked child."""
    _check(_beat_stop())


def watch_start(mutex_address: int, eventfd: int) -> int:
    """A native thread adds 1 to `eventfd` once the lock's owner ended or unlocked it. Returns a handle.

    Start it when the owner holds the lock: a free lock fires at once. The caller keeps `eventfd` open and the lock
    mapped, and calls `watch_stop` once, fired or not.
    """
    return _check(_watch_start(mutex_address, eventfd))


def watch_stop(handle: int, wait: bool = False) -> None:
    """No write to the eventfd happens after this. With `wait` the lock may then be unmapped.

    That takes at most 0.6 s, or as long again as the lock was watched, up to a minute.

    Raises:
        OSError: ENOENT for a handle that is unknown or already stopped.
    """
    _check(_watch_stop(handle, wait))


# ---- memory ----

_map_fd = _bind(_releasing, "map_fd", c_int64, c_int, c_size_t, c_bool)
_unmap = _bind(_releasing, "unmap", c_int, c_void_p, c_size_t)
_populate = _bind(_releasing, "populate", c_int, c_void_p, c_size_t, c_bool)
_copy = _bind(_releasing, "copy", None, c_void_p, c_void_p, c_size_t, c_int)
_checksum = _bind(_releasing, "checksum", c_uint64, c_void_p, c_size_t, c_uint64, c_int)
# (address, length, pieces, turn): a hash of `pieces` times 64 bytes, spread evenly over the range, others at each turn; of a short
# range of all its bytes
sample: Callable[[int, int, int, int], int] = _bind(_holding, "sample", c_uint64, c_void_p, c_size_t, c_uint64, c_uint64)


def map_fd(fd: int, length: int, write: bool = True) -> int:
    """Map `length` bytes of a file, shared; returns the address. The descriptor may be closed, the caller unmaps.

    `length` may exceed the file: touching bytes beyond its end kills with SIGBUS until the file has grown.

    Raises:
        OSError
    """
    return _check(_map_fd(fd, length, write))


def unmap(address: int, length: int) -> None:
    """Undo `map_fd`; nobody may use the address any more.

    Raises:
        OSError
    """
    _check(_unmap(address, length))


def populate(address: int, length: int, write: bool) -> None:
    """Fault in the pages of the range without changing them. The range must lie inside the file.

    Raises:
        OSError: EFAULT beyond the file (SIGBUS before Linux 5.14), EACCES to write what is mapped read-only,
            ENOMEM without room.
    """
    _check(_populate(address, length, write))


def copy(destination: int, source: int, length: int, threads: int = 0) -> None:
    """memcpy of `length` bytes by `threads` threads (0 = pick by size). The ranges must not overlap."""
    _copy(destination, source, length, threads)


def checksum(address: int, length: int, seed: int = 0, threads: int = 0) -> int:
    """Unsigned 64-bit hash of bytes, positions, length and seed; the same for every alignment and thread count."""
    return int(_checksum(address, length, seed, threads))


# ---- this process ----

_set_subreaper = _bind(_releasing, "set_subreaper", c_int)
_set_name = _bind(_releasing, "set_name", c_int, ctypes.c_char_p)


def set_subreaper() -> None:
    """Orphaned descendants become children of this process.

    Raises:
        OSError
    """
    _check(_set_subreaper())


def set_name(name: str) -> None:
    """Name of the calling thread in `ps` and `top`; the first 15 bytes are kept."""
    _check(_set_name(name.encode()))
