"""Hooks that torch.compile leaves out of what it compiles.

torch.compile calls functions of `ftrun.worker` as they are (link/compiling.py), which cuts a compiled module in two at each of them: torch
then compiles parts that it compiles as one under torchrun, and the last bits differ. This file lies outside `ftrun.worker`, so that torch
looks into the hook, sees that it does nothing while it is traced, and compiles the module as if the hook were not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def traced_away(is_compiling: Callable[[], bool], hook: Callable[..., None]) -> Callable[..., None]:
    """Make a hook that a module calls when it runs uncompiled.

    Args:
        is_compiling: `torch.compiler.is_compiling`, which torch replaces by True where it traces.
        hook: Called with what torch gives to a hook.
    """

    def outside_of_graphs(*args: Any) -> None:
        if not is_compiling():
            hook(*args)

    return outside_of_graphs
