"""Processes as /proc shows them."""

from __future__ import annotations

from pathlib import Path


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, None when there is no such process (or only a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
