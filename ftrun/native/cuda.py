"""ctypes binding of the GPU part of libftrun_native: devices, memory that processes share, work in stream order.

Twin of native/include/ftrun_cuda.h. Importing never fails and loads no driver; the first call that needs one does. Without
a driver or a GPU each function raises CudaError. `device` is the driver's ordinal in this process, `stream` a CUstream as an
int (0 = the legacy default stream), addresses and lengths are ints, lengths in bytes, timeouts in seconds.
"""

from __future__ import annotations

import ctypes
import errno
import os
from ctypes import (
    POINTER,
    byref,
    c_bool,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from typing import Any

from ftrun.native import _bind, _releasing

BROKEN = errno.EIO


class CudaError(OSError):
    """A driver call failed; `errno` says of which sort (ENOMEM, ENODEV, ENOEXEC = no kernels, EIO = device or context broken)."""


class _DeviceFacts(ctypes.Structure):
    _fields_ = (
        ("name", c_char * 96),
        ("uuid", c_uint8 * 16),
        ("bytes", c_uint64),
        ("granularity", c_uint64),
        ("major", c_int32),
        ("minor", c_int32),
        ("vmm", c_int32),
        ("writes64", c_int32),
    )


@dataclass(frozen=True)
class Device:
    """One GPU. `uuid` is 16 raw bytes; `granularity` the unit of shareable memory in bytes, 0 when it has none."""

    ordinal: int
    name: str
    uuid: bytes
    bytes: int
    granularity: int
    capability: tuple[int, int]
    vmm: bool
    writes64: bool

    @property
    def uuid_text(self) -> str:
        """As nvidia-smi prints it."""
        raw = self.uuid.hex()
        return f"GPU-{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}"


_why = _bind(_releasing, "cuda_why", c_char_p)
_present = _bind(_releasing, "cuda_present", c_bool)
_driver = _bind(_releasing, "cuda_driver", c_int, POINTER(c_int))
_devices = _bind(_releasing, "cuda_devices", c_int)
_device = _bind(_releasing, "cuda_device", c_int, c_int, POINTER(_DeviceFacts))
_room = _bind(_releasing, "cuda_room", c_int, c_int, POINTER(c_uint64), POINTER(c_uint64))
_owner = _bind(_releasing, "cuda_owner", c_int, c_void_p, POINTER(c_int), POINTER(c_int))
_reserve = _bind(_releasing, "cuda_reserve", c_int64, c_int, c_uint64)
_free_range = _bind(_releasing, "cuda_free_range", c_int, c_uint64, c_uint64)
_create = _bind(_releasing, "cuda_create", c_int, c_int, c_uint64, c_uint64)
_attach = _bind(_releasing, "cuda_attach", c_int, c_int, c_int, c_int, c_uint64, c_uint64)
_unmap = _bind(_releasing, "cuda_unmap", c_int, c_uint64, c_uint64)
_hold = _bind(_releasing, "cuda_hold", c_int, c_int, c_int, POINTER(c_uint64))
_let_go = _bind(_releasing, "cuda_let_go", c_int, c_uint64)
_register = _bind(_releasing, "cuda_register", c_int, c_int, c_void_p, c_size_t, POINTER(c_uint64))
_unregister = _bind(_releasing, "cuda_unregister", c_int, c_int, c_void_p)
_stamp = _bind(_releasing, "cuda_stamp", c_int, c_int, c_uint64, c_uint64, c_uint64)
_copy = _bind(_releasing, "cuda_copy", c_int, c_int, c_uint64, c_uint64, c_uint64, c_uint64)
_sync = _bind(_releasing, "cuda_sync", c_int, c_int, c_uint64, c_double)
_copy_now = _bind(_releasing, "cuda_copy_now", c_int, c_int, c_uint64, c_uint64, c_uint64, c_uint64, c_double)
_checksum = _bind(
    _releasing, "cuda_checksum", c_int, c_int, c_uint64, c_uint64, c_uint64, c_uint64, c_double, POINTER(c_uint64)
)
_kernels = _bind(_releasing, "cuda_kernels", c_int, c_int)


def _check(result: int) -> int:
    if result < 0:
        text = (_why() or b"").decode(errors="replace")
        raise CudaError(-result, text or os.strerror(-result))
    return result


# ---- the driver ----


def present() -> bool:
    """Is a driver part of this process already, whoever loaded it? Loads none."""
    return _releasing is not None and bool(_present())


def driver_version() -> tuple[int, int]:
    """The CUDA version of the driver, such as (12, 4).

    Raises:
        CudaError: ENOENT without a driver, ENOSYS for one before CUDA 12.0.
    """
    version = c_int()
    _check(_driver(byref(version)))
    return version.value // 1000, version.value % 1000 // 10


def device_count() -> int:
    """How many GPUs this process may use.

    Raises:
        CudaError
    """
    return _check(_devices())


def device(ordinal: int) -> Device:
    """What one GPU is. Makes no context on it.

    Raises:
        CudaError: ENODEV.
    """
    facts = _DeviceFacts()
    _check(_device(ordinal, byref(facts)))
    return Device(
        ordinal,
        facts.name.decode(errors="replace"),
        bytes(facts.uuid),
        facts.bytes,
        facts.granularity,
        (facts.major, facts.minor),
        bool(facts.vmm),
        bool(facts.writes64),
    )


def report() -> dict[str, Any]:
    """What `ftrun doctor` shows: {"driver": "12.4", "devices": [...]}, or {"error": why} when there is no usable driver."""
    try:
        major, minor = driver_version()
        found = [device(i) for i in range(device_count())]
    except CudaError as error:
        return {"error": error.strerror}
    return {
        "driver": f"{major}.{minor}",
        "devices": [_facts_of(one) for one in found],
    }


def _facts_of(one: Device) -> dict[str, Any]:
    vmm = one.vmm and one.granularity > 0  # some virtual GPUs say yes and then refuse every call

    return {
        "name": one.name,
        "uuid": one.uuid_text,
        "memory": one.bytes,
        "capability": "{}.{}".format(*one.capability),
        "vmm": vmm,
        "stream_writes": one.writes64,
        "usable": vmm and one.writes64,
    }


def room(ordinal: int) -> tuple[int, int]:
    """(free, total) bytes of a device.

    Raises:
        CudaError
    """
    free, total = c_uint64(), c_uint64()
    _check(_room(ordinal, byref(free), byref(total)))
    return free.value, total.value


def owner(address: int) -> tuple[int | None, bool]:
    """(device, host): on which GPU the memory at `address` is, None = plain host memory; can the CPU read it?

    Raises:
        CudaError
    """
    found, host = c_int(), c_int()
    _check(_owner(address, byref(found), byref(host)))
    return (found.value if found.value >= 0 else None), bool(host.value)


# ---- memory that several processes map ----


def reserve(ordinal: int, length: int) -> int:
    """Address of `length` bytes (a multiple of the granularity) without memory.

    Raises:
        CudaError
    """
    return _check(_reserve(ordinal, length))


def free_range(address: int, length: int) -> None:
    """Give a reserved range back; nothing may be mapped in it.

    Raises:
        CudaError
    """
    _check(_free_range(address, length))


def create(ordinal: int, address: int, length: int) -> int:
    """New zeroed memory, mapped at `address` in a reserved range; a descriptor by which others map it (caller closes).

    Raises:
        CudaError: ENOMEM if the device is full, EOPNOTSUPP if it cannot share memory.
    """
    return _check(_create(ordinal, address, length))


def attach(home: int, ordinal: int, fd: int, address: int, length: int) -> bool:
    """Map the memory behind a descriptor, which lives on `home` and is used by `ordinal`; `fd` may be closed after.

    False: mapped, but for copies only, since kernels of `ordinal` cannot reach `home`.

    Raises:
        CudaError
    """
    return _check(_attach(home, ordinal, fd, address, length)) == 0


def unmap(address: int, length: int) -> None:
    """Undo one `create` or `attach`; its work must be done.

    Raises:
        CudaError
    """
    _check(_unmap(address, length))


def hold(ordinal: int, fd: int) -> int:
    """Keep the memory behind a descriptor alive without mapping it; a handle for `let_go`.

    Raises:
        CudaError
    """
    handle = c_uint64()
    _check(_hold(ordinal, fd, byref(handle)))
    return handle.value


def let_go(handle: int) -> None:
    """End a `hold`.

    Raises:
        CudaError
    """
    _check(_let_go(handle))


def register(ordinal: int, address: int, length: int) -> int:
    """Let streams write to whole pages of host memory; their address for the device.

    Raises:
        CudaError
    """
    seen = c_uint64()
    _check(_register(ordinal, address, length, byref(seen)))
    return seen.value


def unregister(ordinal: int, address: int) -> None:
    """Undo `register`, before the pages are unmapped.

    Raises:
        CudaError
    """
    _check(_unregister(ordinal, address))


# ---- work in stream order ----


def stamp(ordinal: int, stream: int, seen: int, value: int) -> None:
    """Write a 64-bit word once everything queued before is done and visible. Returns at once.

    Raises:
        CudaError
    """
    _check(_stamp(ordinal, stream, seen, value))


def copy(ordinal: int, stream: int, destination: int, source: int, length: int) -> None:
    """Queue a copy between any two places.

    Raises:
        CudaError
    """
    _check(_copy(ordinal, stream, destination, source, length))


def sync(ordinal: int, stream: int, timeout: float) -> bool:
    """Wait until all that is queued on the stream is done; False after `timeout`.

    Raises:
        CudaError: Of that work.
    """
    result = _sync(ordinal, stream, timeout)
    if result == -errno.ETIMEDOUT:
        return False
    _check(result)
    return True


def copy_now(ordinal: int, stream: int, destination: int, source: int, length: int, timeout: float) -> None:
    """Copy and wait.

    Raises:
        CudaError: (after ETIMEDOUT the memory is still in use).
    """
    _check(_copy_now(ordinal, stream, destination, source, length, timeout))


def checksum(ordinal: int, stream: int, address: int, length: int, seed: int, timeout: float) -> int:
    """`ftrun.native.checksum` of device memory, computed there: the same 64 bits.

    Raises:
        CudaError
    """
    result = c_uint64()
    _check(_checksum(ordinal, stream, address, length, seed, timeout, byref(result)))
    return result.value


def load_kernels(ordinal: int) -> None:
    """Load ftrun's kernels on a device.

    Raises:
        CudaError: (ENOEXEC when its driver does not take their PTX).
    """
    _check(_kernels(ordinal))
