"""--numa-binding over invented machines: two sockets, four NUMA nodes, hyper-threads, GPUs in any order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftrun.worker.process import numa

ALL = set(range(16))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Sockets 0 and 1, nodes 0-1 and 2-3; node n has cores 2n, 2n+1, whose second threads are 8 further; a cache a core."""
    for node in range(4):
        write(
            tmp_path / f"devices/system/node/node{node}/cpulist",
            f"{2 * node}-{2 * node + 1},{2 * node + 8}-{2 * node + 9}\n",
        )
    (tmp_path / "devices/system/node/possible").write_text("0-3\n")
    for cpu in range(16):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}"
        pair = f"{cpu % 8},{cpu % 8 + 8}"
        write(folder / "topology/physical_package_id", f"{cpu % 8 // 4}\n")
        write(folder / "topology/thread_siblings_list", f"{pair}\n")
        for index, (level, shared) in enumerate(((1, str(cpu)), (3, pair))):
            write(folder / f"cache/index{index}/level", f"{level}\n")
            write(folder / f"cache/index{index}/shared_cpu_list", f"{shared}\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def gpus(machine: Path, *nodes: int) -> None:
    """GPU k sits at bus k+1, at that NUMA node, and is called GPU-<k>aaaa."""
    for number, node in enumerate(nodes):
        address = f"0000:{number + 1:02X}:00.0"
        write(machine / f"driver/nvidia/gpus/{address}/information", f"Model: \t\t H\nGPU UUID: \t GPU-{number}aaaa\n")
        write(machine / f"bus/pci/devices/{address.lower()}/numa_node", f"{node}\n")


def bound(machine: Path, mode: str, size: int, visible: str | None = None, allowed: set[int] = ALL) -> list[list[int]]:
    return [sorted(numa.processors(mode, rank, size, allowed, visible, machine, machine)) for rank in range(size)]


def test_without_gpus_ranks_are_spread(machine: Path) -> None:
    assert bound(machine, "node", 4) == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    assert bound(machine, "node", 2) == [[0, 1, 8, 9], [4, 5, 12, 13]]
    assert bound(machine, "socket", 2) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]


def test_a_rank_sits_with_its_gpu(machine: Path) -> None:
    gpus(machine, 3, 3, 0, -1)
    assert bound(machine, "node", 3) == [[6, 7, 14, 15], [6, 7, 14, 15], [0, 1, 8, 9]]
    assert bound(machine, "node", 2, "2,GPU-1aaaa") == [[0, 1, 8, 9], [6, 7, 14, 15]]
    assert bound(machine, "node", 1, "GPU-2") == [[0, 1, 8, 9]]
    assert bound(machine, "node", 4)[3] == [6, 7, 14, 15]  # unknown: as without GPUs


def test_exclusive_shares_out_whole_cores(machine: Path) -> None:
    gpus(machine, 3, 3, 0)
    assert bound(machine, "exclusive", 3) == [[6, 14], [7, 15], [0, 1, 8, 9]]
    more = bound(machine, "exclusive", 12)
    assert set().union(*more) == ALL and all(more)


def test_core_complex_is_one_cache(machine: Path) -> None:
    gpus(machine, 3, 3, 3)
    assert bound(machine, "core-complex", 3) == [[6, 14], [7, 15], [6, 14]]


def test_only_processors_that_are_allowed(machine: Path) -> None:
    assert bound(machine, "node", 2, allowed={0, 1, 4}) == [[0, 1], [4]]
    assert bound(machine, "socket", 2, allowed={0, 4}) == [[0], [4]]
    assert bound(machine, "node", 2, allowed={0, 1, 8}) == [[], []], "one node is left: nothing to bind"


def test_one_node_or_none(tmp_path: Path) -> None:
    assert numa.processors("node", 0, 1, ALL, None, tmp_path, tmp_path) == set()
    write(tmp_path / "devices/system/node/node0/cpulist", "0-15\n")
    assert numa.processors("node", 0, 1, ALL, None, tmp_path, tmp_path) == set()


def test_binding_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    one = {min(before)}
    monkeypatch.setattr(numa, "processors", lambda *_: one)
    try:
        assert numa.bind("node", 0, 1, None) == one
        assert all(os.sched_getaffinity(int(task)) == one for task in os.listdir("/proc/self/task"))
    finally:
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), before)
