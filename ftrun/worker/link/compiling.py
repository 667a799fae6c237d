"""Let torch.compile work beside ftrun: the launcher is patient with it, and it does not compile ftrun's own functions."""

from __future__ import annotations

import contextlib

from ftrun.core.shared.board import Busy
from ftrun.worker.link.run_link import Context
from ftrun.worker.torch_compat.torch_private import around_compiling, skip_when_compiling

_out = False
_compiled = False


def stay_out() -> None:
    """Make torch.compile call the functions of this package as they are. The first call in a process takes 2 ms.

    A compiled module calls the hooks of a protected module and the methods of a SwapGroup; to the compiler a group is an opaque
    object, and it raises when it looks into one.
    """
    global _out
    if _out:
        return
    _out = True
    with contextlib.suppress(ImportError, AttributeError):
        skip_when_compiling("ftrun.worker")


def excuse(context: Context) -> None:
    """Ask the launcher for patience whenever torch compiles: that may take minutes, at any step."""

    def begins() -> None:
        global _compiled
        _compiled = True
        context.busy(Busy.COMPILING, True)

    with contextlib.suppress(ImportError, AttributeError):
        around_compiling(begins, lambda: context.busy(Busy.COMPILING, False))


def has_compiled() -> bool:
    """Has torch compiled anything in this process?"""
    return _compiled
