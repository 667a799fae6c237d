"""Processes that make device memory and die: used by the GPU tests and by the bench. Run as `python holding.py WHAT FD SIZE`."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[2]))
_KEPT: list[object] = []


def start(what: str, size: int) -> tuple[subprocess.Popen[bytes], int]:
    """A process that made `size` bytes, filled them with 7s and is now busy as `what` says; the memory's descriptor.

    `pinned`: those bytes are pinned host memory, and the descriptor is of a little on the device.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, str(HERE), what, str(theirs.fileno()), str(size)], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    ours.settimeout(120)
    _, fds, _, _ = socket.recv_fds(ours, 16, 1)
    ours.close()
    if not fds:
        raise RuntimeError(f"the process that was to make device memory ended with {process.wait(60)}")
    return process, fds[0]


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL, and wait until it is gone."""
    process.send_signal(signal.SIGKILL)
    process.wait(60)


def fill(base: int, size: int) -> None:
    """7s, copied from the host: needs no torch."""
    from ftrun.native import cuda

    piece = min(size, 64 << 20)
    sevens = ctypes.create_string_buffer(b"\7" * piece, piece)
    for at in range(0, size, piece):
        cuda.copy_now(0, 0, base + at, ctypes.addressof(sevens), min(piece, size - at), 60)


def _pin(size: int) -> object:
    """Host memory that the driver pinned; to be kept."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        result = (getattr(driver, f"{name}_v2", None) or getattr(driver, name))(*arguments)
        if result:
            raise RuntimeError(f"{name}: CUDA error {result}")

    context, address = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxPushCurrent", context)
    call("cuMemAllocHost", ctypes.byref(address), ctypes.c_size_t(size))
    ctypes.memset(address, 7, size)
    return address


def main(argv: Sequence[str]) -> None:
    from ftrun.native import cuda

    what, fd, size = argv[0], int(argv[1]), int(argv[2])
    unit = cuda.device(0).granularity
    if what == "pinned":
        _KEPT.append(_pin(size))
        size = unit
    assert size % unit == 0
    base = cuda.reserve(0, size)
    shared = cuda.create(0, base, size)
    fill(base, size)
    sock = socket.socket(fileno=fd)
    if what in ("idle", "pinned"):
        socket.send_fds(sock, [b"there"], [shared])
    else:
        _be_busy(what, base, size, sock, shared)
    signal.pause()


def _be_busy(what: str, base: int, size: int, sock: socket.socket, shared: int) -> None:
    import torch

    from ftrun.worker.memory import dlpack

    torch.cuda.init()
    view = dlpack.tensor(base, size, 0)
    if what == "kernel":
        # many seconds of kernels that read the memory: the process is killed in the middle of one
        a = torch.randn(8192, 8192, device="cuda")
        for _ in range(500):
            a = a @ a / 100 + view[:8192].float()
        socket.send_fds(sock, [b"busy"], [shared])
    elif what == "writes":
        # seconds of kernels that write all of the memory, with one of two values in turn
        side = int((size // 4) ** 0.5)
        result = view[: side * side * 4].view(torch.float32).view(side, side)
        a, both = torch.randn(side, side, device="cuda"), [torch.randn(side, side, device="cuda") for _ in range(2)]
        torch.mm(a, both[0], out=result)
        torch.cuda.synchronize()
        for k in range(500):
            torch.mm(a, both[k % 2], out=result)
        socket.send_fds(sock, [b"busy"], [shared])
    elif what == "illegal":
        index = torch.tensor([1 << 40], device="cuda")
        torch.zeros(4, device="cuda").index_select(0, index)  # a device-side assertion or an illegal address
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"the worker's context is broken: {str(error).splitlines()[0]}", file=sys.stderr)
            socket.send_fds(sock, [b"broken"], [shared])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        os._exit(1)
