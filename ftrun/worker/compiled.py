"""torch.compile beside ftrun: the launcher is patient with it, and it leaves ftrun's own functions as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ftrun.core.board import Busy
from ftrun.worker.context import Context

_out = False


def stay_out() -> None:
    """Have torch.compile call the functions of this package as they are. The first call takes 2 ms: the nursery makes it.

    The hooks of a protected module and the methods of a SwapGroup are called in the middle of a compiled module; a
    group is an opaque object to the compiler, which raises when it looks into one.
    """
    global _out
    if _out:
        return
    _out = True
    with contextlib.suppress(ImportError, AttributeError):
        from torch._dynamo import trace_rules

        trace_rules.add(__package__)


def excuse(context: Context) -> None:
    """While torch compiles something the launcher is to be patient: it may take minutes, at any step."""
    with contextlib.suppress(ImportError, AttributeError):
        watch(lambda: context.busy(Busy.COMPILING, True), lambda: context.busy(Busy.COMPILING, False))


def watch(begins: Callable[[], None], ends: Callable[[], None] = lambda: None) -> None:
    """Have both called around every compilation, from now on.

    torch itself forgets whom to call in `torch._dynamo.reset()`. Errors: ImportError, AttributeError in another torch.
    """
    from torch._dynamo.callback import callback_handler as handler

    def register() -> None:
        handler.register_start_callback(lambda _: begins())
        handler.register_end_callback(lambda _: ends())

    def clear() -> None:
        try:
            forget()
        finally:
            register()

    forget = handler.clear
    register()
    handler.clear = clear
