"""Refuse gradients that FSDP2 keeps from body to body and hides: no slot holds them, so a replacement would not have them."""

from __future__ import annotations

from ftrun.core.errors import UsageError
from ftrun.worker.link.callers import caller
from ftrun.worker.link.observer import StepObserver
from ftrun.worker.repair.fully_sharded import FullySharded


class Unreduced(StepObserver):
    """Checks at the end of each body that `Looks` picks.

    Raises:
        UsageError: If the body leaves such a gradient.
    """

    def __init__(self, sharded: FullySharded) -> None:
        self._sharded = sharded

    def step_done(self, number: int) -> None:
        name = self._sharded.unreduced()
        if name:
            raise UsageError(
                f"the body that ends at {caller()} leaves a gradient of {name} that is not reduced yet "
                "(set_requires_gradient_sync(False) or set_requires_all_reduce(False)), where a replacement cannot get it: "
                "do all backwards of an update in one `with step:`"
            )
