"""What it costs: mapping, copies beside the machine's own ceilings, the update's first kernel, a step."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from ftrun import native
from ftrun.native import cuda, transfer
from tests.gpu import conftest, holding, real
from tests.gpu.pack.here import Here, NotHere

_WAIT = 25.0


def timed(what: Callable[[], object], rounds: int = 5) -> float:
    """Median seconds of a call, after one that is not counted."""
    what()
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        what()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _room_for(here: Here, size: int) -> None:
    free, _ = cuda.room(0)
    if free < size:
        raise NotHere(f"{size >> 20} MiB wanted, {free >> 20} MiB are free")


def adopt(here: Here, gigabytes: int) -> None:
    """A dead process's memory: ms to map it, and until the GPU has read a byte of it. Wanted: 20 ms, whatever the size."""
    size = here.size(gigabytes)
    _room_for(here, size + (0 if here.fake else 2 << 30))
    process, fd = holding.start("idle", size)
    handle = cuda.hold(0, fd)
    holding.kill(process)
    mapped, used = [], []
    for _ in range(3):
        base = cuda.reserve(0, size)
        begin = time.perf_counter()
        cuda.attach(0, 0, fd, base, size)
        mapped.append(time.perf_counter() - begin)
        cuda.checksum(0, 0, base + size - 4096, 4096, 0, _WAIT)
        used.append(time.perf_counter() - begin)
        cuda.unmap(base, size)
        cuda.free_range(base, size)
    os.close(fd)
    cuda.let_go(handle)
    here.note("mapped in", f"{1e3 * statistics.median(mapped):.2f} ms")
    here.note("first use after", f"{1e3 * statistics.median(used):.2f} ms")
    here.note("size", f"{size >> 20} MiB")


def copies(here: Here, gigabytes: int) -> None:
    """ftrun's calls beside torch's own copies of the same bytes in the same process (under the fake driver: memmove)."""
    size = here.size(gigabytes)
    _room_for(here, (2 if here.fake else 4) * size)
    base = cuda.reserve(0, 2 * size)
    for at in (base, base + size):
        os.close(cuda.create(0, at, size))
    host, ceiling = _ceilings(here, base, size)
    rates = {
        "H2D": (timed(lambda: cuda.copy_now(0, 0, base, host, size, _WAIT), 3), timed(ceiling["H2D"], 3)),
        "D2D": (timed(lambda: cuda.copy_now(0, 0, base + size, base, size, _WAIT), 3), timed(ceiling["D2D"], 3)),
    }
    for name, (ours, best) in rates.items():
        here.note(name, f"{size / ours / 1e9:.1f} GB/s, {best / ours:.2f} of the ceiling {size / best / 1e9:.1f}")
    here.note("checksum", f"{size / timed(lambda: cuda.checksum(0, 0, base, size, 0, _WAIT), 3) / 1e9:.1f} GB/s")


def _ceilings(here: Here, base: int, size: int) -> tuple[int, dict[str, Callable[[], object]]]:
    """Address of host memory to copy from, and what moves the same bytes as fast as this machine can."""
    if here.fake:
        host = _shared(size)
        native.populate(host, size, True)
        return host, {
            "H2D": lambda: ctypes.memmove(base, host, size),
            "D2D": lambda: ctypes.memmove(base + size, base, size),
        }
    import torch

    one, two = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy(to: Any, source: Any) -> Callable[[], object]:
        def work() -> None:
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        return work

    return pinned.data_ptr(), {"H2D": copy(one, pinned), "D2D": copy(two, one)}


def reload(here: Here) -> None:
    """One participant's reload from plain host memory: pinned buffer, shared buffer, weights, hashed at both ends."""
    size = here.size(1) // 4
    chunk = transfer.chunk_size(size)
    facts = transfer.Facts(1, chunk, size)
    unit = cuda.device(0).granularity
    stride = -(-chunk // unit) * unit
    place = transfer.BUFFERS * stride
    rounded = -(-size // unit) * unit
    base = cuda.reserve(0, place + rounded)
    for at, length in ((base, place), (base + place, rounded)):
        os.close(cuda.create(0, at, length))
    host = _shared(size)
    native.populate(host, size, True)

    def once() -> None:
        ring = _shared(facts.control_bytes)
        facts.prepare(ring)
        on = transfer.OnGpu(0, [base, base + stride])
        facts.run(ring, 0, [(host, size)], [(base + place, size)], transfer.Terms(timeout=_WAIT), on)
        native.unmap(ring, facts.control_bytes)

    here.note("one rank", f"{size / timed(once, 3) / 1e9:.1f} GB/s")


def _shared(size: int) -> int:
    fd = os.memfd_create("ftrun-bench")
    os.ftruncate(fd, size)
    address = native.map_fd(fd, size)
    os.close(fd)
    return address


# -- steps -----------------------------------------------------------------------------------------------------------------


def _both(here: Here, script: str, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the one rank of a script wrote, plain and protected; no bit may differ."""
    found = []
    for name, more in (("plain", ("--plain",)), ("protected", ())):
        running = real.start(here.folder / name, *arguments, *more, script=script, ranks=1)
        outcome = conftest.finish(running, 40.0)
        assert outcome.code == 0 and len(outcome.ranks) == 1, outcome.output[-4000:]
        found += outcome.ranks
    plain, protected = found
    assert plain["weights"] == protected["weights"], "protection changed the weights"
    return plain, protected


def launch_bound(here: Here) -> None:
    """Many small kernels: the CPU is what a step waits for. Wanted: 1.02."""
    plain, protected = _both(here, "launch_bound.py")
    here.note("plain", f"{plain['step_ms']:.2f} ms a step")
    here.note("protected", f"{protected['step_ms']:.2f} ms a step")
    here.note("ratio", f"{protected['step_ms'] / plain['step_ms']:.3f}")


def update_gap(here: Here) -> None:
    """Large kernels: for how long does the device idle between its last gradient and the update's first kernel?"""
    plain, protected = _both(here, "update_gap.py")
    for name, found in (("plain", plain), ("protected", protected)):
        here.note(name, f"{found['gap_us']:.0f} us (to {found['gap_most_us']:.0f}), step {found['step_ms']:.2f} ms")
    here.note("ratio of steps", f"{protected['step_ms'] / plain['step_ms']:.3f}")


def other_stream(here: Here) -> None:
    """Nothing in a stall may wait for a kernel that waits for a dead peer."""
    import torch

    size = 64 << 20
    base = cuda.reserve(0, 2 * size)
    for at in (base, base + size):
        os.close(cuda.create(0, at, size))
    cuda.load_kernels(0)
    other, own = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    calls: dict[str, Callable[[], object]] = {
        "checksum": lambda: cuda.checksum(0, own.cuda_stream, base, size, 0, _WAIT),
        "copy": lambda: cuda.copy_now(0, own.cuda_stream, base + size, base, size, _WAIT),
        "checked copy": lambda: transfer.copy(
            [(base + size, size)], [(base, size)], transfer.Terms(check=transfer.CHECK_BACK, timeout=_WAIT), 0
        ),
    }
    for call in calls.values():
        call()
    with torch.cuda.stream(other):
        torch.cuda._sleep(int(6e9))  # three seconds or more
    slow = []
    for name, call in calls.items():
        begin = time.perf_counter()
        call()
        took = time.perf_counter() - begin
        here.note(name, f"{1e3 * took:.1f} ms")
        if took > 0.5:
            slow.append(name)
    assert not other.query(), "the kernel ended too early to show anything"
    torch.cuda.synchronize()
    assert not slow, f"waited for another stream: {', '.join(slow)}"


def first_use(here: Here) -> None:
    """A spare that knows its device has the first two behind it; with a device of its own for each rank, none."""
    for name, ms in real.program([os.fspath(real.SCRIPTS / "cold.py")], 28.0, real.NCCL).items():
        here.note(name, f"{ms} ms")
