"""How our helper processes are started: a plain interpreter, in a session of its own, with one socket to the launcher.

The current directory is never on the import path of a helper: a user's `random.py` must not shadow the library's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NURSERY = "from ftrun.host import nursery; nursery.main()"
STDIN = 4  # where the nursery holds the stdin that its workers get
_ROOT = str(Path(__file__).resolve().parents[2])

# sys.path[0] stays a place to be replaced: the worker puts the script's folder there, as a plain interpreter would
_PRELUDE = (
    "import sys; root = {root!r}; "
    "sys.path[:1] = [root] if sys.path[:1] == [''] else [root, *sys.path[:1]]; "
    "root in sys.path[1:] or sys.path.append(root); "
)


def command(code: str, *args: str) -> list[str]:
    """Argument vector of an unbuffered interpreter that can import ftrun and runs `code`."""
    return [sys.executable, "-u", "-c", _PRELUDE.format(root=_ROOT) + code, *args]


def start(
    code: str, args: tuple[str, ...], env: Mapping[str, str], pass_fd: int, out: int, stdin: int | None = None
) -> int:
    """Start a helper; it inherits `pass_fd` as descriptor 3 and writes to `out`. Gives its pid. Errors: OSError.

    `stdin` becomes its descriptor STDIN: for workers, it does not read that itself.
    """
    actions: list[tuple[Any, ...]] = [
        (os.POSIX_SPAWN_DUP2, out, 1),
        (os.POSIX_SPAWN_DUP2, out, 2),
        (os.POSIX_SPAWN_DUP2, pass_fd, 3),
    ]
    if stdin is not None:
        actions.append((os.POSIX_SPAWN_DUP2, stdin, STDIN))
    actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
    argv = command(code, *args)
    try:
        return os.posix_spawn(argv[0], argv, dict(env), file_actions=actions, setsid=True, setsigdef=range(1, 32))
    except NotImplementedError:
        return os.posix_spawn(argv[0], argv, dict(env), file_actions=actions, setpgroup=0)
