"""Memory that outlives the worker: a sparse memfd, mapped here and wherever its descriptor travels (the fd store holds one).

The file gets its largest size at once; the kernel allocates pages as they are written.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from ftrun import native
from ftrun.core.errors import DeviceError, PlatformError
from ftrun.core.paths import ENV_RUN_DIR
from ftrun.core.system import files
from ftrun.core.system.cgroup import memory_left


class Segment:
    """A mapped segment. `view(offset, n)` gives bytes, `block(offset, n)` a tensor with a storage of exactly its size."""

    def __init__(self, fd: int, length: int, write: bool = True) -> None:
        self.fd = fd
        self.length = length
        self.address = native.map_fd(fd, length, write)

    @classmethod
    def create(cls, name: str, length: int) -> Segment:
        """Create a zeroed segment of up to `length` bytes.

        Raises:
            PlatformError: The system gives none.
        """
        try:
            fd = os.memfd_create(f"ftrun-{name}", os.MFD_CLOEXEC)
            os.ftruncate(fd, length)
            return cls(fd, length)
        except OSError as error:
            raise PlatformError(f"no shared memory segment of {length >> 20} MiB for {name}: {error}") from error

    @classmethod
    def attach(cls, fd: int, write: bool = True) -> Segment:
        """Map an existing segment; takes over `fd`."""
        return cls(fd, os.fstat(fd).st_size, write)

    def close(self) -> None:
        native.unmap(self.address, self.length)
        os.close(self.fd)

    @property
    def inode(self) -> int:
        """Identity of the memory, the same in every process that maps it."""
        return os.fstat(self.fd).st_ino

    def view(self, offset: int, size: int) -> memoryview:
        return memoryview((ctypes.c_ubyte * size).from_address(self.address + offset)).cast("B")

    def load(self, offset: int) -> int:
        return native.load64(self.address + offset)

    def store(self, offset: int, value: int) -> None:
        """Publish an aligned 64-bit word (release order)."""
        native.store64(self.address + offset, value)

    def block(self, offset: int, size: int) -> torch.Tensor:
        """uint8 tensor over [offset, offset + size) with a storage of its own."""
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(self.address + offset), dtype=torch.uint8)


def is_ample(needed: int) -> bool:
    """Is there room for `needed` more bytes for each rank of this machine? All are assumed to need about the same."""
    left = memory_left() if needed else None
    return left is None or left >= needed * _ranks_here()


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextlib.contextmanager
def room_for(needed: int, what: str) -> Iterator[None]:
    """Check, before the kernel kills, that there is room for the `needed` bytes that the body takes.

    Where the room may not suffice for all ranks at once, they take turns, so that each sees what is left.

    Raises:
        DeviceError: There is too little room; the message gives the amounts.
    """
    if is_ample(needed):
        yield
        return
    with files.open_private(Path(os.environ[ENV_RUN_DIR], "memory.lock")) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel releases it if this worker dies
        left = memory_left()
        if left is not None and left < needed:
            raise DeviceError(
                f"{what} needs {_mib(needed)} of shared memory on each of {_ranks_here()} ranks, and the memory limit (cgroup) "
                f"leaves {_mib(max(left, 0))}; raise the limit by at least {_mib(needed - left)}",
                explain="F204",
            )
        yield


def _mib(size: int) -> str:
    return f"{-(-size // 2**20)} MiB"
