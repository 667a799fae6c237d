"""Sets the command line that ps, top and pgrep -f show for a worker to that of `python -u script`.

A forked worker has the fork server's command line. The kernel shows the memory of a process's original arguments; if the last byte
there is not 0, it shows one text that ends at the first 0 (proc(5), setproctitle(3)).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from ftrun.core.system.procfs import stat

_MOST = 4095  # bytes: the kernel shows one page of such a text
_PLACE = slice(48 - 3, 50 - 3)  # the fields of /proc/PID/stat with the addresses at which the arguments begin and end


def command(kind: str, argv: Sequence[str]) -> list[str]:
    """Return the command with which torchrun starts a worker. `kind` and `argv` as in Settings."""
    return [sys.executable, "-u", *(("-m",) if kind == "module" else ()), *argv]


def room_for(shown: Sequence[str]) -> int:
    """Return the bytes of arguments that a process needs so that it can show this command."""
    return min(len(os.fsencode(" ".join(shown))), _MOST) + 2


def show(shown: Sequence[str]) -> None:
    """Show this command, cut to the room there is. Do nothing if the kernel reports no addresses or forbids the write."""
    begin, end = map(int, (stat("self") or [])[_PLACE] or (0, 0))
    text = os.fsencode(" ".join(shown)).replace(b"\0", b" ")[: max(0, min(end - begin - 2, _MOST))]
    if text:
        with contextlib.suppress(OSError), open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(begin)
            memory.write((text + b"\0").ljust(end - begin, b" "))
