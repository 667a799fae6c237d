"""Choose a worker's processors from /sys and /proc, and bind the worker to them (--numa-binding).

`processors` is a function of two folders and its arguments. A rank belongs to the NUMA node of its GPU; without GPUs
the ranks are spread over the nodes in blocks. It never leaves the set of processors that the process may use already.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Hashable
from pathlib import Path

from ftrun.core.system.visible import entries

_SYS = Path("/sys")
_PROC = Path("/proc")


def bind(mode: str, local_rank: int, local_size: int, visible: str | None) -> set[int]:
    """Bind every thread of this process, and return its processors; empty if there is nothing to bind.

    `visible`: CUDA_VISIBLE_DEVICES as the launcher had it, None if unset.
    """
    chosen = processors(mode, local_rank, local_size, os.sched_getaffinity(0), visible)
    if chosen:
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task), chosen)
    return chosen


def processors(
    mode: str,
    local_rank: int,
    local_size: int,
    allowed: set[int],
    visible: str | None = None,
    sys: Path = _SYS,
    proc: Path = _PROC,
) -> set[int]:
    """Return the processors for one rank; empty if the machine has one NUMA node or does not report them."""
    nodes = _nodes(sys, allowed)
    if len(nodes) < 2:
        return set()
    homes = _homes(local_size, nodes, _gpus(visible, proc), sys)
    home = homes[local_rank]
    mine = nodes[home]
    if mode == "node":
        return mine
    if mode == "socket":
        sockets = {_socket(cpu, sys) for cpu in mine}
        return {cpu for cpus in nodes.values() for cpu in cpus if _socket(cpu, sys) in sockets}
    neighbours = [rank for rank in range(local_size) if homes[rank] == home]
    place = neighbours.index(local_rank)
    if mode == "core-complex":
        groups = _grouped(mine, lambda cpu: _last_cache(cpu, sys))
        groups.sort(key=lambda group: (-len(group), min(group)))
        return groups[place % len(groups)]
    cores = _grouped(mine, lambda cpu: _list_of(sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
    share = cores[len(cores) * place // len(neighbours) : len(cores) * (place + 1) // len(neighbours)]
    # more ranks than cores: some share one
    return set().union(*(share or [cores[place % len(cores)]]))


def cpu_list(text: str) -> set[int]:
    """Parse `0-3,8` into a set."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _list_of(path: Path) -> frozenset[int]:
    try:
        return frozenset(cpu_list(path.read_text()))
    except (OSError, ValueError):
        return frozenset()


def _nodes(sys: Path, allowed: set[int]) -> dict[int, set[int]]:
    """Map each NUMA node to its processors that the process may use; leave out nodes without any."""
    found = {}
    for folder in (sys / "devices/system/node").glob("node*"):
        if folder.name[4:].isdigit():
            found[int(folder.name[4:])] = set(_list_of(folder / "cpulist") & allowed)
    return {node: found[node] for node in sorted(found) if found[node]}


def _homes(local_size: int, nodes: dict[int, set[int]], gpus: list[str], sys: Path) -> list[int]:
    order = list(nodes)
    spread = [order[rank * len(order) // local_size] for rank in range(local_size)]
    for rank, address in enumerate(gpus[:local_size]):
        with contextlib.suppress(OSError, ValueError):
            node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
            if node in nodes:  # -1: the machine does not know
                spread[rank] = node
    return spread


def _gpus(visible: str | None, proc: Path) -> list[str]:
    """Return the PCI addresses of the GPUs that the run may use, by local rank."""
    found: dict[str, str] = {}  # name in CUDA_VISIBLE_DEVICES -> address
    for number, folder in enumerate(sorted((proc / "driver/nvidia/gpus").glob("*"))):
        address = folder.name.lower()
        found[str(number)] = address
        with contextlib.suppress(OSError):
            uuid = re.search(r"GPU UUID:\s*(\S+)", (folder / "information").read_text())
            if uuid:
                found[uuid[1]] = address
    if visible is None:
        return [address for name, address in found.items() if name.isdigit()]
    chosen: list[str] = []
    for part in entries(visible):
        match = [
            address for name, address in found.items() if name == part or (part[:4] == "GPU-" and name.startswith(part))
        ]
        if not match:
            break  # as CUDA does
        chosen.append(match[0])
    return chosen


def _socket(cpu: int, sys: Path) -> int:
    try:
        return int((sys / f"devices/system/cpu/cpu{cpu}/topology/physical_package_id").read_text())
    except (OSError, ValueError):
        return -1


def _last_cache(cpu: int, sys: Path) -> frozenset[int]:
    """Return the processors that share the outermost cache with `cpu`."""
    outermost, shared = -1, frozenset((cpu,))
    for index in (sys / f"devices/system/cpu/cpu{cpu}/cache").glob("index*"):
        with contextlib.suppress(OSError, ValueError):
            level = int((index / "level").read_text())
            if level > outermost:
                outermost, shared = level, _list_of(index / "shared_cpu_list") or shared
    return shared


def _grouped(cpus: set[int], key: Callable[[int], Hashable]) -> list[set[int]]:
    groups: dict[Hashable, set[int]] = {}
    for cpu in sorted(cpus):
        groups.setdefault(key(cpu) or cpu, set()).add(cpu)
    return sorted(groups.values(), key=min)
