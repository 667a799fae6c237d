"""The command that ps, top and pgrep -f show of a worker: that of `python -u script`, as if it had been started so.

A worker's own command line is that of the fork server. The kernel shows what lies in the place of the arguments that a process
was started with; when the last byte there is not 0, it is one text that ends at the first 0 (proc(5), setproctitle(3)).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from ftrun.core.system.procfs import stat

_MOST = 4095  # bytes: of such a text the kernel shows one page
_PLACE = slice(48 - 3, 50 - 3)  # among the fields of /proc/PID/stat: where the arguments begin and end in the memory


def command(kind: str, argv: Sequence[str]) -> list[str]:
    """The command with which torchrun starts a worker. `kind` and `argv` as in Settings."""
    return [sys.executable, "-u", *(("-m",) if kind == "module" else ()), *argv]


def room_for(shown: Sequence[str]) -> int:
    """Bytes that a process's arguments should have, so that it can show this command."""
    return min(len(os.fsencode(" ".join(shown))), _MOST) + 2


def show(shown: Sequence[str]) -> None:
    """Show this command, as far as there is room. Nothing happens where the kernel tells no place, or lets nobody write there."""
    begin, end = map(int, (stat("self") or [])[_PLACE] or (0, 0))
    text = os.fsencode(" ".join(shown)).replace(b"\0", b" ")[: max(0, min(end - begin - 2, _MOST))]
    if text:
        with contextlib.suppress(OSError), open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(begin)
            memory.write((text + b"\0").ljust(end - begin, b" "))
