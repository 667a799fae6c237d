"""Control groups, versions 1 and 2: which ones a process is in, and what they let this process have."""

from __future__ import annotations

from pathlib import Path


def groups(pid: int | str = "self") -> dict[str, str]:
    """Controller -> path of the group that `pid` is in; "" is the group of version 2. Empty when they cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split(":", 2) for line in lines if line.count(":") >= 2)
    return {name: path for _, controllers, path in fields for name in controllers.split(",")}


def memory_left() -> int | None:
    """Bytes that this process's cgroup and those above it may still take; None when no limit can be read."""
    left: list[int] = []
    own = groups()
    if "" in own:
        left += _left_under(Path("/sys/fs/cgroup"), own[""], "memory.max", "memory.current", "")
    if "memory" in own:
        root = Path("/sys/fs/cgroup/memory")
        left += _left_under(root, own["memory"], "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return min(left, default=None)


def _left_under(root: Path, path: str, limit_name: str, usage_name: str, prefix: str) -> list[int]:
    """What each limit from `path` up to `root` leaves (in a container `path` may not be there, the root is)."""
    left = []
    here = root / path.strip("/")
    while True:
        try:
            limit, usage = (here / limit_name).read_text().strip(), int((here / usage_name).read_text())
            stat = dict(line.split() for line in (here / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            limit = ""
        if limit.isdigit() and int(limit) < 1 << 60:
            # the cache of files is counted as used, and given back when memory is asked for
            cache = int(stat.get(f"{prefix}inactive_file", 0)) + int(stat.get(f"{prefix}active_file", 0))
            left.append(int(limit) - usage + cache)
        if here == root:
            return left
        here = here.parent
