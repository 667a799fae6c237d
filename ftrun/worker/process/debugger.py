"""Let a worker stop in Python's debugger without blame for it or for ranks that wait for it; --debug-rank allows one rank only."""

from __future__ import annotations

import signal
import sys
import threading
from types import ModuleType
from typing import Any

from ftrun.core.shared.board import Busy
from ftrun.core.system.procfs import has_stdin
from ftrun.core.system.when_imported import when_imported
from ftrun.core.text import tell
from ftrun.worker.link.run_link import Context

_stops: list[Any] = []  # pdb.set_trace while it is replaced
_passing = False


def pass_over() -> None:
    """Make breakpoint() do nothing, in a spare or in a rank without the terminal."""
    global _passing
    _passing, sys.breakpointhook = True, _passed_over
    when_imported("pdb", _replace)


def settle(context: Context, debug_rank: int | None) -> None:
    """Allow or ignore breakpoints, once the worker has its rank. `debug_rank`: the rank with the terminal, None = any may stop."""
    global _passing
    if debug_rank is not None and debug_rank != context.rank:
        pass_over()
        return
    if _passing:
        _passing, sys.breakpointhook = False, sys.__breakpointhook__
        if _stops:
            sys.modules["pdb"].set_trace = _stops.pop()  # type: ignore[attr-defined]
    when_imported("pdb", lambda pdb: _tell_of(pdb, context, debug_rank))


def _passed_over(*_: Any, **__: Any) -> None:
    pass


def _replace(pdb: ModuleType) -> None:
    if _passing and not _stops:
        _stops.append(pdb.set_trace)
        pdb.set_trace = _passed_over  # type: ignore[attr-defined]


def _tell_of(pdb: ModuleType, context: Context, debug_rank: int | None) -> None:
    """Show on the board when the debugger waits for input; patch the class itself, since torch's debugger derives from it."""
    plain = pdb.Pdb.interaction
    told = False

    def interaction(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal told
        if not told and debug_rank is None:
            told = True
            _advise(context)
        context.busy(Busy.DEBUGGER, True)
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_DFL) if main else None  # pdb would ask on while the run ends
        try:
            return plain(self, *args, **kwargs)
        finally:
            if main:
                signal.signal(signal.SIGINT, before)
            context.busy(Busy.DEBUGGER, False)

    pdb.Pdb.interaction = interaction


def _advise(context: Context) -> None:
    world = context.world
    if not has_stdin():
        tell(f"rank {context.rank} is in the debugger and has no stdin to read from; start it by: ftrun --debug-rank {context.rank}")
    elif world is not None and world.size > 1:
        tell(
            f"rank {context.rank} is in the debugger, and all ranks read from this stdin; to talk to it alone: "
            f"ftrun --debug-rank {context.rank}"
        )
