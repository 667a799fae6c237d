"""Substitute `${local_rank}` in arguments, and turn the process of a worker that is no Python (--no-python) into its program.

A program holds no liveness lock and writes no beat: the launcher only knows that it started and how it ended.
"""

from __future__ import annotations

import os
import signal
import sys

_MACRO = "${local_rank}"
_NOT_FOUND, _NOT_RUNNABLE = 127, 126  # a shell's exit codes


def asks_for_rank(argv: list[str]) -> bool:
    """Does an argument depend on the rank?"""
    return any(_MACRO in argument for argument in argv)


def substituted(argv: list[str], local_rank: int) -> list[str]:
    """Return the arguments with the local rank in place of `${local_rank}`."""
    return [argument.replace(_MACRO, str(local_rank)) for argument in argv]


def become(argv: list[str]) -> int:
    """Run the program in place of this process. If that fails, print the reason and return the exit code."""
    # Python ignores these; a program expects to die of a closed pipe
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except FileNotFoundError as error:
        missing = error.filename if isinstance(error.filename, str) else argv[0]
        hint = " or the interpreter that its first line names" if os.path.exists(missing) else ""
        print(f"ftrun: program {argv[0]}{hint} does not exist", file=sys.stderr, flush=True)
        return _NOT_FOUND
    except OSError as error:
        hint = "; a script needs a first line such as #!/bin/sh" if error.errno == 8 else ""
        print(f"ftrun: program {argv[0]} cannot be run: {error.strerror}{hint}", file=sys.stderr, flush=True)
        return _NOT_RUNNABLE
