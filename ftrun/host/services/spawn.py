"""Starts our helper processes: a plain interpreter, in a session of its own, with one socket to the launcher.

A helper has the import path of a script, PYTHONPATH first, so that the fork server loads the script's torch. The current
directory is never on it: a user's `random.py` must not shadow the standard library's. Every process imports the launcher's ftrun.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ftrun

FORK_SERVER = "from ftrun.helpers import fork_server; fork_server.main(started)"
ALSO = 4  # a second descriptor: the workers' stdin for the fork server, the listening socket for the exporter
_ROOT = str(Path(ftrun.__file__).resolve().parents[1])

# `started`: the modules that a plain interpreter begins with. "" is the current directory, absent with PYTHONSAFEPATH.
# After the import of ftrun, its modules come from its own folder.
_PRELUDE = (
    "import os, sys; started = [*sys.modules]; root = {root!r}; rest = sys.path[sys.path[:1] == ['']:]; "
    "sys.path[:] = [root, *rest]; import ftrun; "
    "sys.path[:] = rest if root in map(os.path.realpath, rest) else [*rest, root]; "
)


def command(code: str, *args: str, room: int = 0) -> list[str]:
    """Return the argument vector of an unbuffered interpreter that can import ftrun and runs `code`.

    The vector is at least `room` bytes long, so that the process or its forks can display another command in its place.
    """
    argv = [sys.executable, "-u", "-c", _PRELUDE.format(root=_ROOT) + code, *args]
    lacking = room - sum(len(os.fsencode(word)) + 1 for word in argv)
    return [*argv, " " * lacking] if lacking > 0 else argv


def start(
    code: str,
    args: tuple[str, ...],
    env: Mapping[str, str],
    pass_fd: int,
    out: int,
    also: int | None = None,
    room: int = 0,
) -> int:
    """Start a helper that runs the Python source `code`, and return its pid. `room`: see `command`.

    `pass_fd` becomes its descriptor 3, `out` its stdout and stderr, `also` its descriptor ALSO.

    Raises:
        OSError: The process cannot be started.
    """
    actions: list[tuple[Any, ...]] = [
        (os.POSIX_SPAWN_DUP2, out, 1),
        (os.POSIX_SPAWN_DUP2, out, 2),
        (os.POSIX_SPAWN_DUP2, pass_fd, 3),
    ]
    if also is not None:
        also = fcntl.fcntl(also, fcntl.F_DUPFD_CLOEXEC, ALSO + 1)  # it may be 3, which `pass_fd` becomes first
        actions.append((os.POSIX_SPAWN_DUP2, also, ALSO))
    actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
    argv = command(code, *args, room=room)
    try:
        return os.posix_spawn(argv[0], argv, dict(env), file_actions=actions, setsid=True, setsigdef=range(1, 32))
    except NotImplementedError:
        return os.posix_spawn(argv[0], argv, dict(env), file_actions=actions, setpgroup=0)
    finally:
        if also is not None:
            os.close(also)
