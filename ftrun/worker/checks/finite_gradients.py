"""Finite gradients: a rank looks at its own before it arrives, so nothing that is not finite reaches the weights.

It costs one read of the gradients a step.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ftrun.core.errors import NonFiniteError
from ftrun.core.shared.board import F, Phase
from ftrun.worker.comm.collective_replay import tensors_of
from ftrun.worker.runtime.observer import StepObserver
from ftrun.worker.runtime.run_link import Context
from ftrun.worker.state.protected_state import ProtectedState

_REDUCING = {
    "allreduce": 0, "allreduce_coalesced": 0, "reduce": 0, "_reduce_scatter_base": 1, "reduce_scatter_single": 1,
    "reduce_scatter": 1, "reduce_scatter_tensor_coalesced": 1,
}  # fmt: skip
"""Collective -> which of its arguments holds this rank's own contribution."""

_FORMATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_WHOLE = 1 << 16  # numbers up to which what is exchanged is looked at whole
_PIECE, _PIECES = 4096, 16  # numbers of a piece, and pieces, of larger tensors
_AFTER_YOU = 1.0  # seconds


class FiniteGradients(StepObserver):
    """`nonfinite` is redo or stop."""

    def __init__(self, context: Context, state: ProtectedState, nonfinite: str) -> None:
        self._context = context
        self._state = state
        self._words = context.cell.words()
        self._nonfinite = nonfinite
        self._poisoned = False  # numbers of this body were not finite on their way into a collective
        self._thorough = False  # the step is done again, and its gradients may not have been finite
        self._flags: list[torch.Tensor] = []  # the same for tensors on devices, not read yet

    def body_started(self) -> None:
        self._poisoned = False
        self._flags.clear()

    def collective_started(self, name: str, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> None:
        place = _REDUCING.get(name)
        if place is None or self._poisoned or self._words[F.PHASE] != Phase.BACKWARD:
            return
        for tensor in tensors_of(args[place]) if place else outputs:
            if tensor.dtype not in _FORMATS:
                continue
            if not tensor.is_cpu:
                self._flags.append(torch.isfinite(tensor).all())  # read at the gate, where the device is waited for
            else:
                self._poisoned = self._poisoned or not self._looks_finite(tensor)

    def _looks_finite(self, tensor: torch.Tensor) -> bool:
        """Is this rank's part of a reduction finite? Large ones are sampled: the gate looks at every number anyway."""
        if not self._thorough and tensor.numel() > _WHOLE and tensor.is_contiguous():
            tensor = tensor.detach().view(-1).unfold(0, _PIECE, (tensor.numel() - _PIECE) // (_PIECES - 1))
        return _is_finite(tensor) or bool(torch.isfinite(tensor).all())  # the sum alone may have overflowed

    def gate_reached(self, number: int, optimizer: Any, grads: list[torch.Tensor | None]) -> None:
        """Errors: NonFiniteError when what the optimizer would apply is not finite."""
        if optimizer is None:
            return
        names = [name for name, _, _ in self._state.params]
        bad = first_bad([(name, grad) for name, grad in zip(names, grads, strict=True) if grad is not None])
        if bad is None or getattr(optimizer, "found_inf", None) is not None:
            return  # with a GradScaler the kernel leaves such an update out; without a kernel for it, the scaler does
        context = self._context
        mine = self._poisoned or any(not bool(flag) for flag in self._flags)
        if not mine and context.world is not None and context.world.size > 1:
            # the exchange gave it to every rank: the one whose own gradients were bad is to be the one that says so
            context.wait_until(lambda: False, _AFTER_YOU)
        name, index = bad
        whose = "its own, before the exchange" if mine else "after the exchange"
        error = NonFiniteError(
            f"the gradient of {name.partition('.')[2].partition('.')[2] or name} is not finite on rank "
            f"{context.rank} (element {index}, {whose}); the update of step {context.position.index_of(number)} is not made"
        )
        error.final = self._nonfinite == "stop"
        raise error

    def gate_passed(self, number: int) -> None:
        self._thorough = False

    def aborted(self, raised: bool) -> None:
        """After somebody's exception: look at every number that this rank gives to the others."""
        self._thorough = self._thorough or raised

    def replaced(self) -> None:
        self._thorough = True


def first_bad(grads: list[tuple[str, torch.Tensor]]) -> tuple[str, int] | None:
    """Name and element of the first number that is not finite."""
    numbers = [(name, values) for name, grad in grads if (values := _numbers(grad)).dtype in _FORMATS]
    looked_at = [values for _, values in numbers if values.numel()]
    # one look, and one wait for a device, for all of them; it may overflow where every number is finite
    if not looked_at or bool(torch.isfinite(torch.nn.utils.get_total_norm(looked_at))):
        return None
    for name, values in numbers:
        bad = torch.isfinite(values).logical_not_().flatten().nonzero()
        if len(bad):
            return name, int(bad[0])
    return None


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether the sum is finite. It is not when one of the numbers is not; it may also overflow.

    On a CPU `get_total_norm` and `isfinite` take ten times as long.
    """
    return math.isfinite(tensor.detach().sum().item())


def _numbers(grad: torch.Tensor) -> torch.Tensor:
    """What a gradient holds on this rank."""
    if hasattr(grad, "to_local"):  # FSDP's are spread over ranks
        grad = grad.to_local()
    if grad.is_sparse:
        return grad.coalesce().values()
    if grad.layout is not torch.strided:
        return grad.to_dense()
    return grad
