"""What ftrun does on one real GPU, in figures. `make gpu-bench`; `--quick` leaves out the largest sizes.

Prints a table and, with `--json FILE`, writes it. Without a GPU it says why and ends with 2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ftrun import native
from ftrun.native import cuda, transfer
from tests.gpu import holding, machine

_GB = 1 << 30
_WAIT = 120.0
_WANTED = {
    "copies device_copy_gb_s": "at least 0.85 of torch's",
    "copies h2d_pinned_gb_s": "at least 0.9 of torch's",
    "adopt_1_gb map_ms": "at most 20",
    "adopt_10_gb map_ms": "at most 20",
    "adopt_40_gb map_ms": "at most 20",
}


def timed(what: Callable[[], object], rounds: int = 5) -> float:
    """Median seconds of a call, after one that is not counted."""
    what()
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        what()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def mapping(size: int) -> dict[str, float]:
    """A dead process's memory of `size` bytes: ms to map it, and ms until the GPU has read a byte of it."""
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
    return {"map_ms": 1e3 * statistics.median(mapped), "first_use_ms": 1e3 * statistics.median(used)}


def copies(size: int) -> dict[str, float]:
    """GB/s through ftrun's calls, beside torch's own copies of the same bytes (the ceiling) in the same process."""
    import torch

    base = cuda.reserve(0, 2 * size)
    cuda.create(0, base, size)
    cuda.create(0, base + size, size)
    one, two = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def torch_copy(to: Any, source: Any) -> Callable[[], None]:
        def copy() -> None:
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        return copy

    def ours(to: int, source: int) -> Callable[[], None]:
        return lambda: cuda.copy_now(0, 0, to, source, size, _WAIT)

    rates = {
        "device_copy": timed(ours(base + size, base)),
        "device_copy_torch": timed(torch_copy(two, one)),
        "h2d_pinned": timed(ours(base, pinned.data_ptr())),
        "h2d_pinned_torch": timed(torch_copy(one, pinned)),
        "checksum": timed(lambda: cuda.checksum(0, 0, base, size, 0, _WAIT)),
    }
    for at in (base, base + size):
        cuda.unmap(at, size)
    return {f"{name}_gb_s": size / seconds / 1e9 for name, seconds in rates.items()}


def reload(size: int) -> dict[str, float]:
    """GB/s of one participant's reload from plain host memory: pinned buffer, shared buffer, weights, hashed at both ends."""
    chunk = transfer.chunk_size(size)
    facts = transfer.Facts(1, chunk, size)
    unit = cuda.device(0).granularity
    stride = -(-chunk // unit) * unit
    place = transfer.BUFFERS * stride
    base = cuda.reserve(0, place + size)
    for at, length in ((base, place), (base + place, size)):
        os.close(cuda.create(0, at, length))
    host = _shared(size)
    native.populate(host, size, True)

    def once() -> None:
        ring = _shared(facts.control_bytes)
        facts.prepare(ring)
        on = transfer.OnGpu(0, [base, base + stride])
        facts.run(ring, 0, [(host, size)], [(base + place, size)], transfer.Terms(timeout=_WAIT), on)
        native.unmap(ring, facts.control_bytes)

    rate = size / timed(once) / 1e9
    for at, length in ((base, place), (base + place, size)):
        cuda.unmap(at, length)
    cuda.free_range(base, place + size)
    native.unmap(host, size)
    return {"one_rank_gb_s": rate}


def _shared(size: int) -> int:
    fd = os.memfd_create("ftrun-bench")
    os.ftruncate(fd, size)
    address = native.map_fd(fd, size)
    os.close(fd)
    return address


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="sizes up to 1 GB only")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    why = machine.missing()
    if why:
        print(f"gpu-bench: {why}", file=sys.stderr)
        return 2
    found: dict[str, Any] = {"machine": machine.facts()}
    begin = time.perf_counter()
    cuda.load_kernels(0)
    found["kernels_load_ms"] = 1e3 * (time.perf_counter() - begin)
    for gigabytes in (1,) if options.quick else (1, 10, 40):
        size = gigabytes * _GB
        free, _ = cuda.room(0)
        found[f"adopt_{gigabytes}_gb"] = mapping(size) if free > size + 4 * _GB else f"no room: {free >> 20} MiB free"
    found["copies"] = copies(_GB // 4 if options.quick else _GB)
    found["host_reload"] = reload(_GB // 4 if options.quick else _GB)
    for name, value in found.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, figure in parts:
            shown = f"{figure:.2f}" if isinstance(figure, float) else figure
            label = f"{name} {part}".strip()
            print(f"{label:36} {shown:>10}  {_WANTED.get(label, '')}".rstrip())
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
