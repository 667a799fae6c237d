"""Record what a rank does between its gate and the end of the body, and whether a replacement could repeat it.

Once a rank has arrived at a gate, the others go on, even if it dies there. If it has a replica, its replacement copies the result.
A shard without replica has only the gradients that its rank sealed on arrival: a replacement makes the update from them, provided
that the region holds nothing but updates by protected optimizers. No replica could reveal a wrong result, so ftrun does not try it
where a replacement might act differently (arguments of step(), hooks, a compiled optimizer, more code).
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from ftrun.worker.link.callers import inside_compiled
from ftrun.worker.link.run_link import Context
from ftrun.worker.link.trees import content
from ftrun.worker.memory import serialization
from ftrun.worker.state.protected_state import ProtectedState
from ftrun.worker.torch_compat.torch_private import step_hooks

Grads = list[Any]
_Writes = list[int]


class UpdateRegion:
    """The update region of the current body.

    `updates`: numbers of the optimizers that stepped, in order; `began`: the optimizer that arrived at the gate, -1 if it is not
    protected, None if the body ends there; `usual`: see usual_after; `plain`: nothing else happened; `gave_up`: something else happened
    once, and may again; `hidden`: no count of writes showed one of these writes; `kept`: all gradients of the gate exist at the end of
    the body, unchanged (else none does).
    """

    def __init__(self, state: ProtectedState) -> None:
        self.updates: list[int] = []
        self.began: int | None = None
        self.usual: list[int] | None = []
        self.plain = False
        self.kept = False
        self._state = state
        self._alone: tuple[bool, bool] | None = None  # the value, and whether it rests on the script's word
        self._numbers = {id(optimizer): number for number, optimizer in enumerate(state.optimizers)}
        self._sums: list[int | None] = []  # of the gradients at the gate
        self._hooks: list[Any] = []  # around the optimizers' steps: ftrun's own
        self._groups = ""  # the optimizers' settings at the gate
        self.hidden = False  # something was written once that no count of writes showed
        self._after: tuple[Any, ...] | None = None  # fingerprint of the state after the last optimizer's step
        self._turn = 0  # which places a glance reads
        self._writes: tuple[_Writes, _Writes] = ([], [])  # counts for the state and the gradients after that step
        self.gave_up = False

    @property
    def alone(self) -> bool:
        """Does no other rank hold all that this one does?"""
        holders = self._state.holders
        on_word = holders.by_word and holders.rest_on_word
        if self._alone is None or self._alone[1] != on_word:
            self._alone = len(self._state.holders.of_everything()) < 2, on_word
        return self._alone[0]

    def begins(self, optimizer: Any, grads: Grads) -> bool:
        """Begin a region, before its gate. Return whether to seal the gradients."""
        self.updates, self._after, self.kept = [], None, False
        self._turn += 1
        self.began = None if optimizer is None else self._numbers.get(id(optimizer), -1)
        alone = self.alone
        if optimizer is None or not alone:  # the body ends here, or a replica will have the result
            self.plain = alone
            return False
        # a scaler makes a fused kernel skip an update that is not finite; a replacement lacks the scaler's tensors
        scaled = getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None
        self.plain = dist.get_world_size() > 1 and not scaled and not self.gave_up
        self.plain = self.plain and (not self._state.looking or all(grad is None or serialization.takes(grad) for grad in grads))
        if not self.plain:
            return False
        # in the bodies that the checks look at, hashes reveal writes that no count shows
        self._sums = self._sums_of(grads) if self._state.looking else []
        if len(self._state.optimizers) > 1:
            self._groups = self._settings()
        return True

    def update_begins(self, optimizer: Any, bare: bool) -> None:
        """Note that a protected optimizer will step. `bare`: the script called `step()` without arguments."""
        if self.plain:
            hooks = [hook for one in self._state.optimizers for hook in step_hooks(one)]
            if not bare or (hooks != self._hooks and any(map(_is_foreign, hooks))) or inside_compiled():
                self._gives_up("an optimizer's step() has arguments, hooks or is compiled")
            self._hooks = hooks
            if self.plain and self.updates and not self._is_as_at_gate():
                self._gives_up("gradients or protected tensors are written between two optimizers")
        self.updates.append(self._numbers.get(id(optimizer), -1))

    def update_done(self) -> None:
        """Note that it has stepped."""
        if self.plain:
            self._after = self._state.stand() if self._state.looking else self._state.glance(self._turn)
            self._writes = self._state.write_counts()

    def ended(self) -> None:
        """Note that the body ended, before the arena takes in what its optimizers made."""
        self.usual = usual_after(self.usual, self.updates)
        if not self.plain or self._after is None:
            return
        writes = self._state.write_counts()
        self.kept = bool(writes[1])
        as_counted = writes[0] == self._writes[0] and (not self.kept or writes[1] == self._writes[1])
        if not self._state.looking and as_counted and self._after == self._state.glance(self._turn):
            return
        if self._was_written(writes[0]):
            self._gives_up(
                "protected tensors are written after optimizer.step() by something else (an average, a projection)"
            )
        elif self.kept and self._were_written(writes[1]):
            self._gives_up("gradients are written after optimizer.step() (zero_grad(set_to_none=False), say)")

    def _gives_up(self, why: str) -> None:
        self.plain, self.gave_up = False, True
        context = Context.current
        kept = context is not None and context.snapshot_every > 0
        then = "all ranks go back to the host snapshot" if kept else "only a host snapshot helps (--snapshot-every)"
        print(
            f"ftrun: {why}: should a rank die at a gate, its update cannot be made again, and {then}", file=sys.stderr, flush=True
        )

    def _is_as_at_gate(self) -> bool:
        to_state, to_grads = self._state.write_counts()
        return not self._was_written(to_state) and not self._were_written(to_grads) and self._settings() == self._groups

    def _was_written(self, to_state: _Writes) -> bool:
        """Was the state written since the last optimizer stepped, even without effect?"""
        changed = self._after != (self._state.stand() if self._state.looking else self._state.glance(self._turn))
        return self._tell(changed, self._writes[0] != to_state)

    def _were_written(self, to_grads: _Writes) -> bool:
        """Were the gradients written since, even without effect?"""
        changed = self._state.looking and self._sums_of(self._state.grads()) != self._sums
        return self._tell(changed, self._writes[1] != to_grads)

    def _tell(self, changed: bool, counted: bool) -> bool:
        self.hidden |= changed and not counted
        return changed or counted

    def _settings(self) -> str:
        groups = [group for optimizer in self._state.optimizers for group in optimizer.param_groups]
        return repr([{key: value for key, value in group.items() if key != "params"} for group in groups])

    def _sums_of(self, grads: Grads) -> list[int | None]:
        return [content(grad) for grad in grads]


def usual_after(usual: list[int] | None, updates: list[int]) -> list[int] | None:
    """Return the optimizers that stepped in every updating body so far: [] before the first, None if they were not always the same."""
    return updates if usual == [] else usual if updates in ([], usual) else None


def _is_foreign(hook: Any) -> bool:
    """Is it not ftrun's? In a replacement's update it would be called twice, or would not exist yet."""
    return not str(getattr(hook, "__module__", "")).startswith("ftrun.worker.")
