"""Tells the launcher of the first step of an optimizer, whether the script protects its model or not.

From then on a restart from the beginning throws work away, and it is known whether the model is protected.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ftrun.core.shared.board import Flag
from ftrun.core.system.when_imported import when_imported
from ftrun.worker.link.run_link import Context


def watch(context: Context) -> None:
    """Begin to look, as soon as the script has torch; never imports it."""
    told = False

    def stepped(*_: Any) -> None:
        nonlocal told
        if not told and context.is_main_process():
            told = True
            context.milestone(Flag.STEPPED)

    def register(optimizer: ModuleType) -> None:
        # it stays: a hook that takes itself away while torch goes through the hooks is an error when another one follows
        optimizer.register_optimizer_step_post_hook(stepped)

    when_imported("torch.optim.optimizer", register)
