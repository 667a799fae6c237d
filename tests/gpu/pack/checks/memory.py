"""Memory of a device: shared by descriptor, after the death of who made it, and what a process's end takes."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from ftrun import native
from ftrun.core.system import procfs
from ftrun.helpers.gpu_reads import GpuReads
from ftrun.host.workers import fence
from ftrun.native import cuda
from tests.gpu import holding, real
from tests.gpu.pack.here import Here

SIZE = 64 << 20
MIB = 1 << 20
_WAIT = 20.0


def ms(since: float) -> float:
    """Milliseconds since a moment of time.perf_counter."""
    return round(1e3 * (time.perf_counter() - since), 2)


def until(what: Callable[[], bool], told: str, timeout: float = 25.0) -> float:
    """Seconds until a condition holds."""
    begin = time.perf_counter()
    while not what():
        assert time.perf_counter() - begin < timeout, f"not within {timeout:.0f} s: {told}"
        time.sleep(0.0005)
    return time.perf_counter() - begin


def facts(here: Here) -> None:
    report = cuda.report()
    for device in report["devices"]:
        assert device["usable"], f"{device['name']} cannot share its memory: {device}"
    one = cuda.device(0)
    here.note("devices", len(report["devices"]))
    here.note("granularity", f"{one.granularity >> 10} KiB")
    begin = time.perf_counter()
    free, total = cuda.room(0)  # makes the context
    here.note("context", f"{ms(begin)} ms")
    here.note("free", f"{free >> 30} of {total >> 30} GiB")


# -- descriptors -----------------------------------------------------------------------------------------------------------

_FRESH = """
import json, sys, time
from ftrun.native import cuda
begin = time.perf_counter()
cuda.room(0)
opened = time.perf_counter()
base = cuda.reserve(0, int(sys.argv[2]))
cuda.attach(0, 0, int(sys.argv[1]), base, int(sys.argv[2]))
mapped = time.perf_counter()
found = cuda.checksum(0, 0, base, int(sys.argv[2]), 0, 20)
print(json.dumps([1e3 * (opened - begin), 1e3 * (mapped - opened), found]))
"""


def _sevens(size: int = SIZE) -> int:
    """The checksum of memory that is full of 7s."""
    held = ctypes.create_string_buffer(b"\7" * size, size)
    return native.checksum(ctypes.addressof(held), size)


def fresh_process(here: Here) -> None:
    begin = time.perf_counter()
    base = cuda.reserve(0, SIZE)
    here.note("reserve and context", f"{ms(begin)} ms")
    begin = time.perf_counter()
    fd = cuda.create(0, base, SIZE)
    here.note("create, map and export", f"{ms(begin)} ms")
    holding.fill(base, SIZE)
    opened, mapped, found = real.program(["-c", _FRESH, str(fd), str(SIZE)], 25.0, fds=(fd,))
    here.note("context there", f"{opened:.1f} ms")
    here.note("import and map there", f"{mapped:.2f} ms")
    assert found == _sevens(), "the other process read other bytes"


def after_kill(here: Here, imported: bool) -> None:
    """The fd store imports, which is the safe choice; whether the bare descriptor would do is a fact, not a fault."""
    process, fd = holding.start("kernel" if not here.fake else "idle", SIZE)
    handle = cuda.hold(0, fd) if imported else 0
    begin = time.perf_counter()
    holding.kill(process)
    here.note("reaped after", f"{ms(begin)} ms")
    begin = time.perf_counter()
    base = cuda.reserve(0, SIZE)
    try:
        cuda.attach(0, 0, fd, base, SIZE)
    except cuda.CudaError as error:
        if imported:
            raise
        here.note("memory", f"is lost with its maker: {error}")
        return
    here.note("mapped in", f"{ms(begin)} ms")
    kept = cuda.checksum(0, 0, base, SIZE, 0, _WAIT) == _sevens()
    here.note("memory", "survives" if kept else "is there with other bytes")
    assert kept or not imported
    if imported:
        cuda.let_go(handle)


def after_illegal(here: Here) -> None:
    """A broken context costs the process and not the memory."""
    process, fd = holding.start("illegal", SIZE)
    handle = cuda.hold(0, fd)
    holding.kill(process)
    base = cuda.reserve(0, SIZE)
    begin = time.perf_counter()
    cuda.attach(0, 0, fd, base, SIZE)
    here.note("mapped in", f"{ms(begin)} ms")
    assert cuda.checksum(0, 0, base, SIZE, 0, _WAIT) == _sevens(), "other bytes"
    cuda.let_go(handle)


def open_export(here: Here) -> None:
    """A descriptor that somebody forgot: does it keep memory of the device for itself?"""
    free = cuda.room(0)[0]
    process, fd = holding.start("idle", 4 * SIZE)
    holding.kill(process)
    left = free - cuda.room(0)[0]
    os.close(fd)
    time.sleep(0.1)
    here.note("kept by the descriptor alone", f"{left // MIB} of {4 * SIZE // MIB} MiB")
    here.note("kept after its close", f"{(free - cuda.room(0)[0]) // MIB} MiB")
    assert here.fake or free - cuda.room(0)[0] < SIZE, "device memory leaks"


_HOLD = """
import sys
from ftrun.native import cuda
handle = cuda.hold(0, int(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


def holder(here: Here) -> None:
    """A driver may want a context for an import, which then takes that much of the device."""
    base = cuda.reserve(0, SIZE)
    fd = cuda.create(0, base, SIZE)
    before, _ = cuda.room(0)
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(fd)],
        env={**os.environ, **real.SETTINGS},
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and b"held" in process.stdout.readline()
        here.note("takes", f"{(before - cuda.room(0)[0]) // MIB} MiB of the device")
    assert process.returncode == 0


def read_for_others(here: Here) -> None:
    """What another node asks for comes while the streams of the script are busy: they may wait for the rank that is being replaced."""
    from ftrun.worker.memory.arena import Arena
    from ftrun.worker.repair import gpu_reader

    arena = Arena.create(0, SIZE, 0)
    at, memory = arena.reserve("committed", SIZE, True), arena.gpu_part
    holding.fill(memory.base + at, SIZE)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    buffer = gpu_reader.Buffer(0)
    buffer.prepare(0)
    reads = GpuReads(ours, os.dup(buffer.segment.fd), memory.length)
    threading.Thread(target=gpu_reader.serve, args=(theirs, memory, buffer, 0)).start()
    room = bytearray(SIZE)
    busy = None
    if not here.fake:
        import torch

        torch.cuda._sleep(4_000_000_000)  # some seconds of the default stream
        busy = torch.cuda.current_stream()
    begin, done = time.perf_counter(), 0
    while done < SIZE:
        done += reads.read(memoryview(room)[done:], at + done)
    took = time.perf_counter() - begin
    assert busy is None or not busy.query(), "the read waited for the script's stream"
    reads.end()
    here.note("read", f"{SIZE / took / 1e9:.2f} GB/s")
    held = (ctypes.c_ubyte * SIZE).from_buffer(room)
    assert native.checksum(ctypes.addressof(held), SIZE) == _sevens(), "other bytes"


# -- the end of a process --------------------------------------------------------------------------------------------------


def teardown(here: Here, pinned: bool) -> None:
    """How long a killed process stays: until its threads are gone, it can be reaped, the device has its memory back."""
    size = here.size(4)
    free = cuda.room(0)[0]
    process, fd = holding.start("pinned" if pinned else "idle", size)
    os.close(fd)
    begin = time.perf_counter()
    process.kill()
    quiet = until(lambda: fence.quiet(process.pid), "its threads ended")
    ended = quiet + until(lambda: fence.ended(process.pid), "it ended", 55)
    process.wait(55)
    reaped = time.perf_counter() - begin
    here.note("size", f"{size // MIB} MiB {'pinned' if pinned else 'of the device'}")
    here.note("runs no code after", f"{1e3 * quiet:.1f} ms")
    here.note("over after", f"{1e3 * ended:.1f} ms")
    here.note("reaped after", f"{1e3 * reaped:.1f} ms")
    if not pinned and not here.fake:
        back = until(lambda: free - cuda.room(0)[0] < size // 2, "the device has its memory back")
        here.note("memory back after", f"{1e3 * (reaped + back):.1f} ms")


def quiet(here: Here) -> None:
    """Killed in the middle of seconds of queued kernels that write memory: adopting waits for `fence.ended`; is that enough?"""
    size = 256 << 20
    process, fd = holding.start("writes", size)
    base = cuda.reserve(0, size)
    cuda.attach(0, 0, fd, base, size)

    def look() -> int:
        return cuda.checksum(0, 0, base, size, 0, _WAIT)

    seen = {look() for _ in range(20) if not time.sleep(0.01)}
    assert len(seen) > 1, "nothing writes there"
    begin = time.perf_counter()
    process.kill()
    until(lambda: fence.ended(process.pid), "its end")
    here.note("over after", f"{ms(begin)} ms")
    over, last, changed = time.perf_counter(), look(), 0.0
    while time.perf_counter() - over < 2:
        now = look()
        if now != last:
            last, changed = now, time.perf_counter() - over
    here.note("last write", f"{1e3 * changed:.0f} ms after that" if changed else "before that")
    assert not changed, "memory of a dead process changed after its end"


# -- kernels and tensors ---------------------------------------------------------------------------------------------------


def kernels(here: Here) -> None:
    """The lowered PTX loads, and computes the checksum that the host computes."""
    cuda.room(0)
    begin = time.perf_counter()
    cuda.load_kernels(0)
    here.note("loaded in", f"{ms(begin)} ms")
    random.seed(1)
    size = 9 << 20
    data = random.randbytes(size)
    base = cuda.reserve(0, 64 << 20)
    os.close(cuda.create(0, base, 10 << 20))
    held = ctypes.create_string_buffer(data, size)
    address = ctypes.addressof(held)
    cuda.copy_now(0, 0, base, address, size, _WAIT)
    for length in (0, 1, 63, 64, 4 << 20, (4 << 20) + 9, size - 8):
        for offset in (0, 3):
            want = native.checksum(address + offset, length, 5)
            assert cuda.checksum(0, 0, base + offset, length, 5, _WAIT) == want, (length, offset)


def dlpack(here: Here) -> None:
    import torch

    from ftrun.worker.memory import dlpack

    base = cuda.reserve(0, SIZE)
    os.close(cuda.create(0, base, SIZE))
    view = dlpack.tensor(base + 512, 4096, 0)
    assert view.device == torch.device("cuda", 0) and view.data_ptr() == base + 512 and view.numel() == 4096
    floats = view.view(torch.float32)
    floats.copy_(torch.arange(1024.0))
    assert abs((floats @ floats).item() / (1024 * 1023 * 2047 / 6) - 1) < 1e-5
    assert view.untyped_storage().nbytes() == 4096
    del view, floats
    torch.cuda.synchronize()


def random_stream(here: Here) -> None:
    import torch

    from ftrun.worker.state import rng

    torch.cuda.init()
    rng.use_device(0)
    torch.cuda.manual_seed(3)
    torch.rand(1000, device="cuda")
    begin = time.perf_counter()
    state = rng.capture()
    here.note("captured in", f"{ms(begin)} ms")
    first = torch.rand(10_000, device="cuda"), torch.randn(77)
    rng.apply(state)
    second = torch.rand(10_000, device="cuda"), torch.randn(77)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "other numbers"
    assert rng.capture() != state


_PEAK = """
import json
import torch
from ftrun.native import cuda
from ftrun.worker.memory.arena import Arena
from ftrun.worker.state.protected_state import ProtectedState
model = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, bias=False, device="cuda") for _ in range(16)))
size = sum(p.numel() * p.element_size() for p in model.parameters())
state = ProtectedState([model], [torch.optim.SGD(model.parameters(), lr=0.1)], {})
arena = Arena.create(0, state.bytes_now(), state.gpu)
torch.cuda.empty_cache()
ballast = torch.empty(cuda.room(0)[0] - (5 << 29), dtype=torch.uint8, device="cuda")
left = cuda.room(0)[0]
before = [p.detach().sum().item() for p in model.parameters()]
state.move_in(arena)
torch.cuda.synchronize()
assert before == [p.detach().sum().item() for p in model.parameters()]
print(json.dumps([size, left]))
"""


def peak(here: Here) -> None:
    """Four GiB of parameters, and two and a half GiB free: torch's cache gives back what was moved."""
    size, left = real.program(["-c", _PEAK], 55.0)
    assert left < size
    here.note("moved", f"{size // MIB} MiB of parameters with {left // MIB} MiB free")


_SEEN = "import json; from ftrun.native import cuda; print(json.dumps(cuda.report()))"


def hidden(here: Here) -> None:
    """CUDA_VISIBLE_DEVICES by UUID, by a part of one, in another order, and empty."""
    report = cuda.report()
    uuids = [device["uuid"] for device in report["devices"]]
    for variable in (uuids[0], uuids[-1][:12], ",".join(reversed(uuids))):
        seen = real.program(["-c", _SEEN], 20.0, {"CUDA_VISIBLE_DEVICES": variable})
        wanted = [next(u for u in uuids if u.startswith(part)) for part in variable.split(",")]
        assert [device["uuid"] for device in seen["devices"]] == wanted, variable
    assert "error" in real.program(["-c", _SEEN], 20.0, {"CUDA_VISIBLE_DEVICES": ""})
    here.note("order", "one device, nothing to order" if len(uuids) == 1 else "as asked for")
    if "MIG" not in report["devices"][0]["name"]:
        here.note("MIG", "off here, not tried")


def pinned_of(pid: int) -> int:
    """KiB that a process has locked or pinned, as far as the kernel counts it."""
    status = procfs.status(pid)
    return sum(int(status.get(name, "0 kB").split()[0]) for name in ("VmLck", "VmPin"))
