"""What a rank watches in itself on the way to its gate: finite gradients, equal replicas, its own share of a step's time.

Everything here runs in the rank itself and costs one read of the gradients a step. What it finds is said before the rank
arrives, so the gate stays shut and nothing of it reaches the weights.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch

from ftrun.core.board import F, Inexact, Phase, sum_of, sum_word
from ftrun.core.errors import NonFiniteError
from ftrun.core.replicas import corrupt
from ftrun.worker.comm.collective_replay import tensors_of

if TYPE_CHECKING:
    from ftrun.worker.engine import Engine

_REDUCING = {
    "allreduce": 0, "allreduce_coalesced": 0, "reduce": 0, "_reduce_scatter_base": 1, "reduce_scatter_single": 1,
    "reduce_scatter": 1, "reduce_scatter_tensor_coalesced": 1,
}  # fmt: skip
"""Collective -> which of its arguments holds this rank's own contribution."""

_FORMATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_WHOLE = 1 << 16  # numbers up to which what is exchanged is looked at whole
_PIECE, _PIECES = 4096, 16  # numbers of a piece, and pieces, of larger tensors
_AFTER_YOU = 1.0  # seconds
_FIRST_CHECKS = 2  # the first gates, at which it is learned whether ranks are replicas


class Vigil:
    """`nonfinite` is redo, stop or ignore; replicas are compared every `every` steps, 0 = never."""

    def __init__(self, engine: Engine, nonfinite: str, every: int) -> None:
        self._engine = engine
        self._cell = engine.context.cell
        self._words = self._cell.words()
        self._nonfinite = nonfinite
        self._every = every
        self._poisoned = False  # numbers of this body were not finite on their way into a collective
        self._thorough = False  # the step is done again, and its gradients may not have been finite
        self._flags: list[torch.Tensor] = []  # the same for tensors on devices, not read yet
        self._since = 0  # when this rank's own work in the step began, ns
        self._waited = 0  # ns of waiting for others before that
        self._measured = False
        self._trusted = False  # all replicas were equal when last compared
        self._checking = -1  # gate at which replicas are compared
        self._agreed = -1  # the last one at which they may go on

    # -- the course of a step ----------------------------------------------------------------------------------------

    def body_began(self) -> None:
        self._poisoned = False
        self._flags.clear()
        self._measured = False
        if not self._since:
            self._start_clock()

    def sending(self, name: str, args: tuple[Any, ...], first: list[torch.Tensor]) -> None:
        """A collective is about to start: what this rank puts in is still its own. `first`: the tensors of args[0]."""
        place = _REDUCING.get(name)
        if place is None or self._engine.passed or self._words[F.PHASE] != Phase.BACKWARD:
            return
        if not self._measured:
            self._measure()
        if self._nonfinite == "ignore" or self._poisoned:
            return
        for tensor in tensors_of(args[place]) if place else first:
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

    def arriving(self, step: int, optimizer: Any, grads: list[torch.Tensor | None]) -> None:
        """The body is about to arrive; `optimizer` is the one that will update `grads`, None when none does.

        Errors: NonFiniteError when what it would apply is not finite.
        """
        if not self._measured:
            self._measure()
        if optimizer is not None and self._nonfinite != "ignore":
            self._check_gradients(step, optimizer, grads)
        self._publish_sum(step)

    def passed(self) -> None:
        """The gate opened: every rank starts its next share of work at this moment."""
        self._thorough = False
        self._start_clock()

    # -- its own time ------------------------------------------------------------------------------------------------

    def _start_clock(self) -> None:
        self._since = time.monotonic_ns()
        self._waited = self._engine.registry.waited

    def _measure(self) -> None:
        """Own work ends where the first gradients are exchanged: after that all ranks are as slow as the slowest."""
        self._measured = True
        if self._since:
            waited = self._engine.registry.waited - self._waited
            self._words[F.WORK] = max(0, time.monotonic_ns() - self._since - waited)

    # -- finite gradients --------------------------------------------------------------------------------------------

    def _check_gradients(self, step: int, optimizer: Any, found: list[torch.Tensor | None]) -> None:
        engine = self._engine
        names = [name for name, _, _ in engine.state.params]
        bad = first_bad([(name, grad) for name, grad in zip(names, found, strict=True) if grad is not None])
        if bad is None or getattr(optimizer, "found_inf", None) is not None:
            return  # with a GradScaler the kernel leaves such an update out; without a kernel for it, the scaler does
        mine = self._poisoned or any(not bool(flag) for flag in self._flags)
        if not mine and engine.context.world is not None and engine.context.world.size > 1:
            # the exchange gave it to every rank: the one whose own gradients were bad is to be the one that says so
            engine.context.wait_until(lambda: False, _AFTER_YOU)
        name, index = bad
        whose = "its own, before the exchange" if mine else "after the exchange"
        error = NonFiniteError(
            f"the gradient of {name.partition('.')[2].partition('.')[2] or name} is not finite on rank "
            f"{engine.context.rank} (element {index}, {whose}); the update of step {engine.index_of(step)} is not made"
        )
        error.final = self._nonfinite == "stop"
        raise error

    # -- equal replicas ----------------------------------------------------------------------------------------------

    def _publish_sum(self, step: int) -> None:
        self._checking = -1
        world = self._engine.context.world
        if not self._every or world is None or world.size < 2 or (step >= _FIRST_CHECKS and step % self._every):
            return
        value = self._sum()
        if value is None:
            return
        self._trusted = self._trusted or self._others_trust()
        self._cell[F.SUM_AT] = 0
        self._cell[F.SUM] = value
        self._cell[F.SUM_AT] = sum_word(step, self._trusted)
        self._checking = step

    def _sum(self) -> int | None:
        """Checksum of what every replica must have bit for bit; None when nothing is replicated."""
        engine = self._engine
        value, found = 0, False
        for entry in engine.state.replicated(engine.state.manifest):
            value = engine.state.arena.checksum(entry, value)
            found = True
        return value if found else None

    def holds(self, step: int) -> bool:
        """Every rank has arrived at `step`. True: the launcher must first replace one whose weights are corrupt."""
        if self._checking != step or self._agreed == step:
            return False
        context = self._engine.context
        assert context.world is not None
        cells = [context.board.cell(place.cell) for place in context.world.places]
        words = [sum_of(c[F.SUM_AT]) for c in cells]
        sums = [c[F.SUM] for c in cells]
        if any(at != step for at, _ in words):
            self._agreed = step
            return False  # a rank that replicates nothing, or compares at other steps
        if corrupt(sums, [trusted for _, trusted in words]):
            return True
        self._trusted = len(set(sums)) == 1
        self._agreed = step
        return False

    def _others_trust(self) -> bool:
        """One rank opens each gate, and it alone needs to have compared: the others learn it from its word."""
        context = self._engine.context
        assert context.world is not None
        return any(sum_of(context.board.cell(p.cell)[F.SUM_AT])[1] for p in context.world.places)

    def suspect(self) -> None:
        """A step is done again after somebody's exception: look at every number that this rank gives to the others."""
        self._thorough = True

    def inherit(self) -> None:
        """A replacement: what its predecessor saw is not known, nor what it spoilt when it was corrupt."""
        self.suspect()
        context = self._engine.context
        world = context.world
        assert world is not None
        lost = (world.lost or {}).get(str(context.rank))
        if lost is not None and context.board.cell(lost)[F.CORRUPT] and self._every != 1:
            self._engine.note_inexact(Inexact.WAS_CORRUPT)


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
