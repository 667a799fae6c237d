"""Seal the gradients of a rank without replica on its arrival at the gate: one call copies all of them."""

from __future__ import annotations

from typing import Any

import torch

from ftrun.worker.memory import serialization
from ftrun.worker.repair.recovery_points import SEALED, Slots
from ftrun.worker.torch_compat import torch_private

Grads = list["torch.Tensor | None"]


class SealedGradients:
    """One rank's gradients in the slot SEALED.

    The first write, and each one with other gradients, encodes them; later writes know the places of their bytes in the slot.
    """

    def __init__(self) -> None:
        self._slots: Slots | None = None
        self._form: list[Any] = []  # dtype, shape and kind of each
        self._places: list[torch.Tensor] = []  # views of the slot, for the gradients that exist

    def write(self, slots: Slots, step: int, grads: Grads) -> None:
        """Seal them for the gate of `step`."""
        form = [None if grad is None else (grad.dtype, grad.shape, grad.layout, grad.device.type) for grad in grads]
        if slots is self._slots and form == self._form:
            slots.invalidate(SEALED)
            torch_private.copy_each(self._places, [grad for grad in grads if grad is not None])
            slots.seal(SEALED, step)
            return
        pieces = serialization.encode(grads, "gradients")
        slots.write_large(SEALED, step, pieces)
        there = [grad for grad in grads if grad is not None]
        self._slots = None
        if any(grad.layout is not torch.strided or not grad.numel() for grad in there):
            return  # their encoded sizes may change
        self._slots, self._form, self._places = slots, form, []
        at = sum(len(piece) for piece in pieces[: len(pieces) - len(there)])
        for grad in there:
            size = grad.numel() * grad.element_size()
            self._places.append(slots.block(SEALED, at, size).view(grad.dtype).view(grad.shape))
            at += size
