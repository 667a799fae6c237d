"""Finite gradients: a rank checks the numbers that it gives to the others, and the result before it arrives.

To read every number of a large model in every step costs too much. So a rank reads the part of each exchange that the budget of the
checks pays for, another part in each step and never less than 64 Ki numbers; it reads small models and long steps whole. It reads the
result of the exchange whole if a part was not finite, and in a look (see the glossary).
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from ftrun.core import grace
from ftrun.core.errors import NonFiniteError
from ftrun.core.shared.board import F, Phase
from ftrun.worker.comm.collective_replay import tensors_of
from ftrun.worker.link.observer import StepObserver
from ftrun.worker.link.run_link import Context
from ftrun.worker.state.looks import SHARE, Looks
from ftrun.worker.state.protected_state import ProtectedState

_REDUCING = {
    "allreduce": 0, "allreduce_coalesced": 0, "reduce": 0, "_reduce_scatter_base": 1, "reduce_scatter_single": 1,
    "reduce_scatter": 1, "reduce_scatter_tensor_coalesced": 1,
}  # fmt: skip
"""Collective -> which of its arguments holds this rank's own contribution."""

_FORMATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_WHOLE = 1 << 16  # a rank reads at least so many numbers of each exchange


class FiniteGradients(StepObserver):
    """Refuses an update with gradients that are not finite; `nonfinite` is redo or stop."""

    def __init__(self, context: Context, state: ProtectedState, looks: Looks, nonfinite: str) -> None:
        self._context = context
        self._state = state
        self._looks = looks
        self._words = context.cell.words()
        self._nonfinite = nonfinite
        self._judged = False  # this body's gradients must be finite
        self._poisoned = False  # this body gave numbers to a collective that were not finite
        self._exchanged = False  # this body gave numbers to a collective
        self._sums: list[
            torch.Tensor
        ] = []  # of device tensors that went into a collective: not finite if one of their numbers is not
        self._totals: list[torch.Tensor] = []  # for each device, the sum of its sums
        self._part = 1.0  # share of each exchange that this rank reads
        self._numbers = 0  # how many this body exchanged
        self._pace = 0.0  # ns that it takes to read one of them

    def body_started(self) -> None:
        if self._state.looking and self._numbers and self._pace and self._looks.step_ns:
            self._part = min(1.0, SHARE * self._looks.step_ns / (self._pace * self._numbers))
        self._poisoned = self._exchanged = False
        self._numbers = 0
        self._sums.clear()
        self._totals.clear()

    def collective_started(self, name: str, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> None:
        place = _REDUCING.get(name)
        if place is None or self._poisoned or self._words[F.PHASE] != Phase.BACKWARD:
            return
        self._exchanged = True
        for tensor in tensors_of(args[place]) if place else outputs:
            if tensor.dtype not in _FORMATS:
                continue
            if not tensor.is_cpu:
                self._sums.append(_sum_on_device(tensor))
                continue
            size, since = tensor.numel(), time.monotonic_ns()
            self._numbers += size
            wanted = size if self._state.looking else max(_WHOLE, int(self._part * size))
            if wanted < size and tensor.is_contiguous():
                at = self._looks.bodies * wanted % size
                tensor = tensor.detach().view(-1)[at : at + wanted]
            fine = math.isfinite(tensor.detach().sum().item())  # as `_is_finite`, without a call
            if size >= _WHOLE and self._state.looking:
                self._pace = (time.monotonic_ns() - since) / size
            self._poisoned = not (fine or bool(torch.isfinite(tensor).all()))  # the sum alone may have overflowed

    def gate_ahead(self, number: int, optimizer: Any, grads: list[torch.Tensor | None]) -> None:
        """Make each device add its sums up; the device that the gate waits for copies the total to the host meanwhile."""
        self._judged = optimizer is not None and getattr(optimizer, "found_inf", None) is None
        if not self._judged:  # with a GradScaler the kernel, or the scaler, skips an update that is not finite
            return
        if not self._exchanged:
            self._sums += [_sum_on_device(grad) for grad in self._few() if not grad.is_cpu]
        for device in {one.device for one in self._sums}:
            total = torch.stack([one for one in self._sums if one.device == device]).sum()
            is_waited_for = total.is_cuda and device.index == self._state.gpu
            self._totals.append(total.to("cpu", non_blocking=True) if is_waited_for else total)

    def gate_reached(self, number: int, optimizer: Any, grads: list[torch.Tensor | None]) -> None:
        """Check the gradients. Raises NonFiniteError if the optimizer would apply numbers that are not finite."""
        if not self._judged:
            return
        mine = self._poisoned or not all(map(math.isfinite, map(torch.Tensor.item, self._totals)))
        if not (mine or self._state.looking) and (self._exchanged or self._few_are_finite()):
            return
        since = time.monotonic_ns()
        names = [name for name, _, _ in self._state.params]
        bad = first_bad([(name, grad) for name, grad in zip(names, grads, strict=True) if grad is not None])
        self._looks.spent(since)
        if bad is None:
            return
        context = self._context
        if not mine and context.world is not None and context.world.size > 1:
            # the exchange gave it to every rank: the one whose own gradients were bad must report it first
            context.wait_until(lambda: False, grace.EXCHANGED)
        name, index = bad
        whose = "its own, before the exchange" if mine else "after the exchange"
        error = NonFiniteError(
            f"the gradient of {name.partition('.')[2].partition('.')[2] or name} is not finite on rank "
            f"{context.rank} (element {index}, {whose}); the update of step {context.position.index_of(number)} is not made"
        )
        error.final = self._nonfinite == "stop"
        raise error

    def _few(self) -> list[torch.Tensor]:
        """Sample the gradients of a body without an exchange: a loss that is not finite makes every gradient so."""
        grads = (param.grad for _, param in self._state.few)
        return [_numbers(grad) for grad in grads if grad is not None and grad.is_floating_point()]

    def _few_are_finite(self) -> bool:
        return all([_is_finite(grad) for grad in self._few() if grad.is_cpu])


def _sum_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Sum up in one kernel, without memory as large as the tensor. If that overflows, `gate_reached` checks each gradient."""
    return tensor.detach().sum(dtype=torch.float32)


def first_bad(grads: list[tuple[str, torch.Tensor]]) -> tuple[str, int] | None:
    """Return the name and element of the first number that is not finite."""
    numbers = [(name, values) for name, grad in grads if (values := _numbers(grad)).dtype in _FORMATS]
    looked_at = [values for _, values in numbers if values.numel()]
    # one test, and one wait for a device, for all of them; it may overflow though every number is finite
    if not looked_at or bool(torch.isfinite(torch.nn.utils.get_total_norm(looked_at))):
        return None
    for name, values in numbers:
        bad = torch.isfinite(values).logical_not_().flatten().nonzero()
        if len(bad):
            return name, int(bad[0])
    return None


def _is_finite(tensor: torch.Tensor) -> bool:
    """Is the sum finite? It is not if one of the numbers is not; it may also overflow.

    On a CPU `get_total_norm` and `isfinite` take ten times as long.
    """
    return math.isfinite(tensor.detach().sum().item())


def _numbers(grad: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a gradient on this rank."""
    if hasattr(grad, "to_local"):  # FSDP's are spread over ranks
        grad = grad.to_local()
    if grad.is_sparse:
        return grad.coalesce().values()
    if grad.layout is not torch.strided:
        return grad.to_dense()
    return grad
