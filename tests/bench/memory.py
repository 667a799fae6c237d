"""Memory of every process of a run, read from /proc while it trains. In MB (10^6 bytes)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class Memory:
    """`own`: pages nobody else maps. `shared_memory`: resident pages of memfd and tmpfs mappings (the arena is one)."""

    pid: int
    resident: float
    own: float
    proportional: float
    shared_memory: float


def memory(pid: int) -> Memory:
    """Raises OSError when the process is gone."""
    fields: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    shared = sum(
        int(x.split()[1]) * 1024 for x in Path(f"/proc/{pid}/status").read_text().splitlines() if "RssShmem" in x
    )
    own = fields["Private_Clean"] + fields["Private_Dirty"] + fields.get("Private_Hugetlb", 0)
    return Memory(pid, fields["Rss"] / 1e6, own / 1e6, fields["Pss"] / 1e6, shared / 1e6)


def descendants(pid: int) -> dict[int, str]:
    """Live processes below `pid` and their names."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                head, _, tail = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue
            parents[int(entry.name)] = int(tail.split()[1])
            names[int(entry.name)] = head.partition("(")[2]
    found: dict[int, str] = {}
    grew = True
    while grew:
        new = {p: names[p] for p, parent in parents.items() if p not in found and (parent == pid or parent in found)}
        found |= new
        grew = bool(new)
    return found
