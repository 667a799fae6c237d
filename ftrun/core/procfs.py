"""Processes as the kernel shows them: in /proc, and at their end."""

from __future__ import annotations

import os
from pathlib import Path


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, None when there is no such process (or only a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def exit_code(status: int) -> int:
    """A wait status as an exit code, 128 + n for signal n."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
