"""Transfers on the host: peer copy, adopting, reload from the host snapshot, and what overlapping its stages is worth.

    python tests/bench/transfer.py [--rounds N] [--quick] [--results FOLDER]

Definitions. memcpy: libc's memcpy over warm shared memory, the range cut in one piece a thread, the better of one and of
one a core. Peer copy: transfer.copy between two warm segments, as restore uses it. Adopt: from asking the fd store for the
segment to a tensor over its first parameter. Host reload: four processes, each sends a quarter of the snapshot and
receives the whole; time from a common start to the last one's end; bytes are all that were written, staging included.
One after another: the same copies by the same four processes, with a barrier behind each stage of each chunk. Link: a copy
into the staging buffer takes as long as a given rate says, and the processor sleeps for what is left of it.
Things that are compared take turns; every figure is a median, with the smallest and largest beside it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ftrun import native
from ftrun.native import transfer
from ftrun.native.transfer import CHECK_BACK, CHECK_NONE, CHECK_READ, Facts, Terms
from tests.bench import tables

MB = 1_000_000
RECEIVERS = 4
CORES = len(os.sched_getaffinity(0))
LIBC = ctypes.CDLL(None)
LIBC.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
FORK = multiprocessing.get_context("fork")
HASHED = "hashed on the way"
ALL_BACK = "hashed, all read back"  # what restore asks for
IN_CACHE = "hash alone, in cache, 1 thread"
CHECKS = {"unchecked": CHECK_NONE, HASHED: CHECK_READ, ALL_BACK: CHECK_BACK}


def shared(size: int) -> int:
    """Address of warm memory that several processes map."""
    fd = os.memfd_create("ftrun-bench")
    os.ftruncate(fd, size)
    address = native.map_fd(fd, size)
    os.close(fd)
    native.populate(address, size, True)
    return address


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def memcpy(to: int, source: int, size: int, threads: int) -> None:
    piece = -(-size // threads // 4096) * 4096

    def copy(number: int) -> None:
        at = min(number * piece, size)
        LIBC.memcpy(to + at, source + at, min(piece, size - at))

    helpers = [threading.Thread(target=copy, args=(n,)) for n in range(1, threads)]
    for helper in helpers:
        helper.start()
    copy(0)
    for helper in helpers:
        helper.join()


def peer_copy(size: int, rounds: int) -> dict[str, Any]:
    """GB/s of memcpy and of the engine's peer copy, taking turns, each round in another order."""
    source, to = shared(size), shared(size)
    ways: dict[str, Callable[[], float]] = {}
    for threads in sorted({1, CORES}):
        name = f"memcpy, {threads} thread{'s' * (threads > 1)}"
        ways[name] = lambda threads=threads: seconds(lambda: memcpy(to, source, size, threads))  # type: ignore[misc]
    for name, check in CHECKS.items():
        terms = Terms(check=check)
        ways[name] = lambda terms=terms: transfer.copy([(to, size)], [(source, size)], terms).seconds  # type: ignore[misc]
    ways["read alone"] = lambda: seconds(lambda: native.checksum(source, size, 0, CORES))
    small = 64 << 10  # stays in a core's cache
    ways[IN_CACHE] = lambda: (
        seconds(lambda: [native.checksum(source, small, 0, 1) for _ in range(200)]) * size / small / 200
    )
    found: dict[str, list[float]] = {name: [] for name in ways}
    ratios: dict[str, list[float]] = {name: [] for name in CHECKS}
    for number in range(rounds + 1):
        names = [*ways][number % len(ways) :] + [*ways][: number % len(ways)]
        rates = {name: size / ways[name]() for name in names}
        if number == 0:
            continue  # page tables and clocks
        best = max(rate for name, rate in rates.items() if name.startswith("memcpy"))
        for name in CHECKS:
            ratios[name].append(rates[name] / best)
        for name, rate in rates.items():
            found[name].append(rate / 1e9)
    native.unmap(source, size)
    native.unmap(to, size)
    return {
        "bytes": size,
        "gb_per_s": found,
        "of_memcpy": ratios,
    }


class Gang:
    """Processes that do one thing at the same time, each with warm memory to receive into."""

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count
        self.snapshot = shared(size)
        self.targets = [shared(size) for _ in range(count)]
        self.facts = Facts(count, transfer.chunk_size(size // count), size)
        self.ring = shared(self.facts.ring_bytes)
        self.results = shared(4096)
        self.mapped = [(self.snapshot, size), (self.ring, self.facts.ring_bytes)]

    def close(self) -> None:
        for address, size in (
            (self.snapshot, self.size),
            (self.ring, self.facts.ring_bytes),
            (self.results, 4096),
            *((t, self.size) for t in self.targets),
        ):
            native.unmap(address, size)

    def time(self, work: Callable[[int, Any], int]) -> tuple[float, int]:
        """Seconds from a common start to the end of the last; bytes written by all. `work(me, barrier)` gives bytes."""
        barrier = FORK.Barrier(self.count)
        start = FORK.Barrier(self.count + 1)

        def one(me: int) -> None:
            # a forked child has no page tables yet for what its parent shares: that is no part of a transfer
            for address, size in (*self.mapped, (self.targets[me], self.size)):
                native.populate(address, size, True)
            start.wait()
            written = work(me, barrier)
            native.store64(self.results + 16 * me, written)
            native.store64(self.results + 16 * me + 8, time.monotonic_ns())

        children = [FORK.Process(target=one, args=(me,)) for me in range(self.count)]
        for child in children:
            child.start()
        start.wait()
        begin = time.monotonic_ns()
        for child in children:
            child.join()
            if child.exitcode:
                raise SystemExit(f"a participant ended with {child.exitcode}")
        end = max(native.load64(self.results + 16 * me + 8) for me in range(self.count))
        written = sum(native.load64(self.results + 16 * me) for me in range(self.count))
        return (end - begin) / 1e9, written

    def overlapped(self, check: int) -> tuple[float, int]:
        facts = self.facts
        ctypes.memset(self.ring, 0, facts.control_bytes)
        facts.prepare(self.ring)

        def work(me: int, _: Any) -> int:
            offset, share = facts.share(me)
            terms = Terms(threads=1, check=check)
            return facts.run(
                self.ring, me, [(self.snapshot + offset, share)], [(self.targets[me], self.size)], terms
            ).copied

        return self.time(work)

    def in_turn(self) -> tuple[float, int]:
        """The unchecked stages, one after another: load, broadcast, reload, behind a barrier each."""
        facts, chunk = self.facts, self.facts.chunk
        buffers = self.ring + facts.control_bytes
        loaded = [shared(chunk) for _ in range(self.count)]
        kept, self.mapped = self.mapped, [*self.mapped, *((address, chunk) for address in loaded)]

        def work(me: int, barrier: Any) -> int:
            shares = [facts.share(who) for who in range(self.count)]
            written = 0
            for at in range(0, max(size for _, size in shares), chunk):
                offset, share = shares[me]
                mine = max(0, min(chunk, share - at))
                native.copy(loaded[me], self.snapshot + offset + at, mine, 1)
                barrier.wait()
                native.copy(buffers + transfer.BUFFERS * me * chunk, loaded[me], mine, 1)
                barrier.wait()
                written += 2 * mine
                for who, (begin, size) in enumerate(shares):
                    there = max(0, min(chunk, size - at))
                    native.copy(self.targets[me] + begin + at, buffers + transfer.BUFFERS * who * chunk, there, 1)
                    written += there
                barrier.wait()
            return written

        try:
            return self.time(work)
        finally:
            self.mapped = kept
            for address in loaded:
                native.unmap(address, chunk)

    def limit(self, written: int) -> tuple[float, int]:
        """As many bytes by plain memcpy in as many processes: what the memory gives."""
        each = written // self.count

        def work(me: int, _: Any) -> int:
            done = 0
            while done < each:
                piece = min(self.size, each - done)
                LIBC.memcpy(self.targets[me], self.snapshot, piece)
                done += piece
            return done

        return self.time(work)


def host_reload(size: int, rounds: int) -> dict[str, Any]:
    gang = Gang(size, RECEIVERS)
    _, written = gang.overlapped(CHECK_NONE)
    ways: dict[str, Callable[[], tuple[float, int]]] = {
        "unchecked": lambda: gang.overlapped(CHECK_NONE),
        "memcpy": lambda: gang.limit(written),
        HASHED: lambda: gang.overlapped(CHECK_READ),
        "one after another": gang.in_turn,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    ratios: dict[str, list[float]] = {"unchecked": [], HASHED: []}
    gains: list[float] = []
    for number in range(rounds + 1):
        took: dict[str, float] = {}
        for name in [*ways][number % len(ways) :] + [*ways][: number % len(ways)]:
            took[name], done = ways[name]()
            if done != written:
                raise SystemExit(f"{name} wrote {done} bytes, the reload {written}")
        if number == 0:
            continue
        for name in ways:
            rates[name].append(written / took[name] / 1e9)
        for name, values in ratios.items():
            values.append(took["memcpy"] / took[name])
        gains.append(took["one after another"] / took["unchecked"])
    chunk = gang.facts.chunk
    gang.close()
    return {
        "bytes": size,
        "receivers": RECEIVERS,
        "chunk": chunk,
        "written": written,
        "gb_per_s": rates,
        "of_limit": ratios,
        "overlap_gain": gains,
    }


def linked(size: int, rounds: int) -> dict[str, Any] | None:
    """The same stages with a link before the staging buffers (overlap.cpp); None without a C++ compiler.

    The link's rate is chosen so that it takes as long as the processor takes for the rest, which is where overlapping is
    worth most; then half and double that.
    """
    compiler = shutil.which("c++")
    if compiler is None:
        return None
    root = Path(__file__).resolve().parents[2]
    names = ("process/bell", "process/life", "process/thread", "memory/checksum", "memory/memory")
    names += ("transfer/exchange", "transfer/host_device", "transfer/transfer")
    sources = [root / "native/src" / f"{name}.cpp" for name in names]
    with tempfile.TemporaryDirectory(prefix="ftrun-bench-") as folder:
        program = Path(folder, "overlap")
        options = ["-std=c++17", "-O2", "-D_GNU_SOURCE", "-pthread", f"-I{root}/native/include", f"-I{root}/native/src"]
        subprocess.run(
            [compiler, *options, Path(__file__).with_name("overlap.cpp"), *sources, "-o", program], check=True
        )

        def run(rate: float) -> tuple[float, float]:
            line = [program, str(size // MB), str(rate / MB)]
            overlapped, turns = subprocess.run(
                line, check=True, capture_output=True, text=True, timeout=120
            ).stdout.split()
            return float(overlapped), float(turns)

        processor = statistics.median(run(1e12)[1] for _ in range(3))
        even = size / RECEIVERS / processor
        found = {}
        for name, rate in (("half", even / 2), ("even", even), ("double", 2 * even)):
            runs = [run(rate) for _ in range(rounds)]
            found[name] = {"mb_per_s": rate / MB, "gain": [turns / took for took, turns in runs]}
        return {"bytes": size, "seconds_without_link": processor, "links": found}


def adopt(sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """ms to have a dead rank's arena: ask the fd store, map, read its manifest, make a tensor. A real fd store process."""
    import torch

    from ftrun.core import paths
    from ftrun.core.shared.board import Board
    from ftrun.host.services.services import _FD_STORE, Helper
    from ftrun.worker.link.fd_store import FdStoreClient
    from ftrun.worker.memory.arena import Arena, Manifest, place
    from ftrun.worker.memory.segment import Segment

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ftrun-bench-") as folder:
        Board.create(Path(folder, paths.BOARD), 4)
        helper = Helper("fd store", _FD_STORE, lambda message: None)
        out = os.open(os.devnull, os.O_WRONLY)
        helper.start((folder,), os.environ, out)
        client = FdStoreClient(Path(folder, paths.FD_STORE_SOCKET))
        try:
            deadline = time.monotonic() + 30
            while not Path(folder, paths.FD_STORE_SOCKET).exists():
                if time.monotonic() > deadline:
                    raise SystemExit("the fd store did not start")
                time.sleep(0.01)
            for size in sizes:
                arena = Arena.create(0, size)
                manifest = Manifest()
                blocks: dict[int, torch.Tensor] = {}
                for entry, view in place(arena, "committed", [("param.0", torch.empty(size // 4), False)], blocks):
                    manifest.entries.append(entry)
                    view.fill_(1.5)
                arena.write_manifest(manifest)
                arena.sealed(3)
                client.put(0, "arena", 0, arena.segment.fd)
                times = []
                for _ in range(rounds):
                    begin = time.perf_counter()
                    fd = client.get(0, "arena")
                    assert fd is not None
                    mine = Arena(Segment.attach(fd))
                    entry = mine.read_manifest().entries[0]
                    tensor = mine.tensor(entry, {})
                    sealed = mine.seal == 3 and float(tensor[-1]) == 1.5
                    times.append((time.perf_counter() - begin) * 1e3)
                    if not sealed:
                        raise SystemExit("adopted something else")
                    del tensor
                    mine.segment.close()
                found[str(size)] = times
                del view
                blocks.clear()
                client.forget(0, "arena")
                arena.segment.close()
        finally:
            helper.kill()
            os.waitpid(helper.pid, 0)
            os.close(out)
    return found


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The table: what was moved, at what rate, and how much that is of what the memory allows."""
    copy, reload, linked = result["peer_copy"], result["host_reload"], result["linked"]
    found = []
    for what, part, limit in (
        (f"peer copy of {copy['bytes'] // MB} MB", copy, copy["of_memcpy"]),
        (f"reload of {reload['bytes'] // MB} MB by {reload['receivers']} receivers", reload, reload["of_limit"]),
    ):
        for name, values in part["gb_per_s"].items():
            share = tables.figure(limit[name], "times") if name in limit else ""
            found.append([what, name, tables.figure(values, "GB/s"), share])
    found.append(
        [
            "the reload's stages overlapped",
            "against one after another",
            tables.figure(reload["overlap_gain"], "times"),
            "",
        ]
    )
    for name, one in linked["links"].items() if linked is not None else ():
        words = f"a link in front, {name} the rate of the rest"
        found.append(["the reload's stages overlapped", words, tables.figure(one["gain"], "times"), ""])
    found += [
        ["adopt, 0 B moved", f"{int(s) // MB} MB", tables.figure(v, "ms"), ""] for s, v in result["adopt_ms"].items()
    ]
    return found


def main() -> None:
    parser = tables.arguments("Measure how state moves between the memories of this machine.")
    parser.add_argument("--quick", action="store_true", help="smaller pieces")
    args = parser.parse_args()
    size = (256 if args.quick else 1024) * MB // 4096 * 4096
    sizes = [256 * MB, 1024 * MB] if args.quick else [256 * MB, 1024 * MB, 4096 * MB]
    rounds = args.rounds or 9
    # the processes of a reload are forked: before torch, and its threads, are here
    result = {
        "peer_copy": peer_copy(size, rounds),
        "host_reload": host_reload(size // 2, rounds),
        "linked": linked(size // 4, rounds),
        "adopt_ms": adopt(sizes, rounds),
    }
    notes = (
        "On the host, no GPU. Of the limit: against a plain memcpy of the same bytes by as many threads or processes."
    )
    head = ["what", "how", "rate, gain or time", "of the limit"]
    tables.write(args.results, "transfer", "Moving state", head, rows(result), notes)


if __name__ == "__main__":
    main()
