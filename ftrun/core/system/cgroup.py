"""Reads control groups, versions 1 and 2: the groups of a process, and their memory limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def groups(pid: int | str = "self") -> dict[str, str]:
    """Return the path of the group of `pid` for each controller; key "" is the group of version 2. {} if they cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split(":", 2) for line in lines if line.count(":") >= 2)
    return {name: path for _, controllers, path in fields for name in controllers.split(",")}


def group_files(pid: int | str, controller: str, v1: str, v2: str) -> Iterator[Path]:
    """Yield file `v1` of the controller's group of `pid`, and file `v2` of its version 2 group, as far as they exist.

    In a container the path may be the host's; then the file at the root of the mount belongs to our group.
    """
    own = groups(pid)
    found = [(_ROOT / controller, own[controller], v1)] if controller in own else []
    found += [(base, own[""], v2) for base in (_ROOT, _ROOT / "unified") if "" in own]
    for base, group, name in found:
        yield from [path for path in (base / group.strip("/") / name, base / name) if path.is_file()][:1]


def memory_left() -> int | None:
    """Return the bytes that this process may still take under its cgroup's limits and those above it; None without a readable limit."""
    left: list[int] = []
    own = groups()
    if "" in own:
        left += _left_under(_ROOT, own[""], "memory.max", "memory.current", "")
    if "memory" in own:
        left += _left_under(_ROOT / "memory", own["memory"], "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return min(left, default=None)


def _left_under(root: Path, path: str, limit_name: str, usage_name: str, prefix: str) -> list[int]:
    """Return the bytes that each limit from `path` up to `root` leaves (in a container `path` may be missing, the root exists)."""
    left = []
    here = root / path.strip("/")
    while True:
        try:
            limit, usage = (here / limit_name).read_text().strip(), int((here / usage_name).read_text())
            stat = dict(line.split() for line in (here / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            limit = ""
        if limit.isdigit() and int(limit) < 1 << 60:
            # the kernel counts the page cache of files as used, but frees it when a process needs memory
            cache = int(stat.get(f"{prefix}inactive_file", 0)) + int(stat.get(f"{prefix}active_file", 0))
            left.append(int(limit) - usage + cache)
        if here == root:
            return left
        here = here.parent
