"""torch.compile beside ftrun: the launcher is patient with it, and it leaves ftrun's own functions as they are."""

from __future__ import annotations

import contextlib

from ftrun.core.shared.board import Busy
from ftrun.worker.link.run_link import Context
from ftrun.worker.torch_compat.torch_private import around_compiling, skip_when_compiling

_out = False


def stay_out() -> None:
    """Have torch.compile call the functions of this package as they are. The first call takes 2 ms: a process pays it once.

    The hooks of a protected module and the methods of a SwapGroup are called in the middle of a compiled module; a
    group is an opaque object to the compiler, which raises when it looks into one.
    """
    global _out
    if _out:
        return
    _out = True
    with contextlib.suppress(ImportError, AttributeError):
        skip_when_compiling("ftrun.worker")


def excuse(context: Context) -> None:
    """While torch compiles something the launcher is to be patient: it may take minutes, at any step."""
    with contextlib.suppress(ImportError, AttributeError):
        around_compiling(lambda: context.busy(Busy.COMPILING, True), lambda: context.busy(Busy.COMPILING, False))
