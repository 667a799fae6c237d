"""What a rank does between its gate and the end of the body, and whether a replacement could do it in its place.

The others go on when a rank has arrived at a gate, also when it dies there. Where another rank holds the same, its result is copied.
A shard that is nobody else's has only the gradients that its rank left, sealed, on arrival: a replacement makes the update itself,
provided that the region is nothing but updates by protected optimizers.
"""

from __future__ import annotations

import sys
from typing import Any

from ftrun.worker.runtime.sharded_private import local_of
from ftrun.worker.runtime.torch_private import writes_to
from ftrun.worker.runtime.trees import checksum
from ftrun.worker.state.protected_state import ProtectedState
from ftrun.worker.state.python_state import params_of

_GUARDED = 3  # first updates after which all parameters are looked at; then every 100th. In between a sample is
Grads = list[Any]


class UpdateRegion:
    """The region of the current body. `updates`: numbers of the optimizers that stepped, in order; `plain`: nothing else happened."""

    def __init__(self, state: ProtectedState) -> None:
        self.updates: list[int] = []
        self.plain = False
        self._state = state
        self._alone: bool | None = None
        self._count = 0
        self._sums: list[int | None] = []  # of the gradients at the gate, where several optimizers use them
        self._after: tuple[int, ...] | None = None  # what stands for the state when the last optimizer had stepped
        self._void = False  # a script that did more once may do it again

    @property
    def alone(self) -> bool:
        """Does no other rank hold all that this one does?"""
        if self._alone is None:
            self._alone = len(self._state.replicas()) < 2
        return self._alone

    def begins(self, optimizer: Any, grads: Grads) -> bool:
        """A gate is about to be arrived at. Are its gradients to be sealed?"""
        self.updates, self._after = [], None
        # a kernel that itself leaves out an update that is not finite is told so by a scaler, which a replacement does not have
        scaled = getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None
        self.plain = self.alone and not scaled and not self._void
        if not self.plain or optimizer is None:  # without one the body ends here
            return False
        if len(self._state.optimizers) > 1:
            self._sums = self._sums_of(grads)
        return True

    def update_begins(self, optimizer: Any) -> None:
        """A protected optimizer is about to step."""
        if not self.alone:
            return
        number = next((i for i, own in enumerate(self._state.optimizers) if own is optimizer), -1)
        if self.updates and self.plain:
            mine = {id(param) for param in params_of(optimizer)}
            now = self._sums_of(self._state.grads())
            pairs = zip(self._state.tensors, self._sums, now, strict=True)
            self.plain = self._mark() == self._after and all(a == b for p, a, b in pairs if id(p) in mine)
        self.updates.append(number)

    def update_done(self) -> None:
        """And has."""
        if self.alone:
            self._after = self._mark()

    def ended(self) -> None:
        """The body was left; what its optimizers made is where they made it."""
        if not self.plain or self._after is None:
            return
        self.plain = self._after == self._mark()
        self._count += 1
        if not self.plain:
            self._void = True
            print(
                "ftrun: protected tensors are written after optimizer.step() by something else (an average, a projection): should a rank "
                "die at a gate, its update cannot be made again, and only a host snapshot helps (--snapshot-every)",
                file=sys.stderr,
                flush=True,
            )

    def _mark(self) -> tuple[int, ...]:
        """What stands for parameters and optimizer state: their bytes, now and then; a part of them; how often each was written."""
        looking = self._count < _GUARDED or self._count % 100 == 0
        writes = sum(writes_to(param) + writes_to(local_of(param)) for param in self._state.tensors)
        return self._state.params_checksum() if looking else 0, self._state.sample(self._count), writes

    def _sums_of(self, grads: Grads) -> list[int | None]:
        return [None if grad is None else checksum(grad.detach().cpu()) for grad in grads]
