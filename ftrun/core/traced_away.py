"""Makes hooks that leave no trace in a graph of torch.compile.

torch.compile does not trace functions of `ftrun.worker` (link/compiling.py), so each call of one breaks the graph of a compiled module:
torch then compiles two graphs where it compiles one under torchrun, and the last bits differ. This file lies outside `ftrun.worker`, so
torch traces into the hook, sees that it does nothing while it is traced, and compiles the module as if there were no hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def traced_away(is_compiling: Callable[[], bool], hook: Callable[..., None]) -> Callable[..., None]:
    """Make a hook that a module calls when it runs uncompiled.

    Args:
        is_compiling: `torch.compiler.is_compiling`, which torch replaces by True while it traces.
        hook: Called with the arguments that torch passes to a hook.
    """

    def outside_of_graphs(*args: Any) -> None:
        if not is_compiling():
            hook(*args)

    return outside_of_graphs
