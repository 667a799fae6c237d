"""Names what the loop changes and `Variables` does not keep: what has no copy, is too large, or is not to be kept.

It looks at the start of the first body, after the third step, and after the last step of a loop: what changed between two looks is
state. A replacement has other values there, so a run that was repaired must not be called exact. Then the first rank of each node also
tells what is kept.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch

from ftrun.core.shared.left_out import shown
from ftrun.core.shared.notes import KeptCopy, KeptNote
from ftrun.worker.link.callers import script_frames
from ftrun.worker.link.observer import StepObserver
from ftrun.worker.link.run_link import Context
from ftrun.worker.state.loop_names import LoopNames, names_of
from ftrun.worker.state.plain_values import PlainValues
from ftrun.worker.state.protected_state import ProtectedState
from ftrun.worker.state.signs import hooks_on, sign_of
from ftrun.worker.state.variables import Variables

_SECOND_LOOK = 3  # bodies
_ABSENT = object()  # a name that was not there at the first look


class LeftOut(StepObserver):
    """Names what `variables` does not keep."""

    def __init__(self, context: Context, state: ProtectedState, variables: Variables) -> None:
        self._context = context
        self._state = state
        self._variables = variables
        variables.told = functools.partial(self._lost, why="another value since a repair")
        self._first: dict[str, Any] | None = None  # name -> what showed that it changed, at the first look
        self._loops = 0
        self._bodies = 0
        self._told: dict[str, str] = {}  # name -> why it is not kept

    def loop_started(self, first: int, length: int) -> None:
        self._loops += length > 0  # a job.call between two loops is none
        self.told_by.ignore("arrived", self)  # at the gates of steps: they are counted

    def body_started(self) -> None:
        self._bodies += 1
        if self._first is None:
            self._first = self.look()
        if self._bodies == _SECOND_LOOK:
            self.told_by.ignore("body_started", self)

    def handed_out(self, number: int) -> None:
        if self._bodies == _SECOND_LOOK:
            self._compare()
            self._tell_kept(number)
            self.told_by.ignore("handed_out", self)

    def loop_ending(self, number: int) -> None:
        self.told_by.listen("arrived", self)

    def arrived(self, number: int) -> None:
        """At the gate at the end of a loop: all variables were looked at for it."""
        self._compare()
        self._tell_kept(number)
        self.told_by.ignore("arrived", self)

    def _compare(self) -> None:
        """Name what changed since the first look."""
        if self._first is None:
            return
        now = self.look()
        changed = sorted(n for n, v in now.items() if self._first.get(n, _ABSENT) != v and n not in self._told)
        if not changed:
            return
        self._lost(changed)
        context = self._context
        if context.rank == 0:
            print(
                f"ftrun: changed by the loop, and not kept: {shown(changed, self._told)}; after a repair a rank may go on with other "
                "values. Index by step.index in place of an iterator, give what is large and has a state_dict() to protect(name=...), and "
                "what is meant to stay out, or the name of its variable, to protect(..., ignore=[...])",
                file=sys.stderr,
                flush=True,
            )

    def _lost(self, names: Iterable[str], why: str = "") -> None:
        """For the closing line."""
        self._told |= {name: self._variables.why_not(name) or why for name in names}
        self._context.note_left_out(self._told)

    def _tell_kept(self, number: int) -> None:
        """For the launcher, which says it once, and for who asks later."""
        context = self._context
        if context.local_rank:
            return
        copies = tuple(KeptCopy(tuple(names), size) for names, size in self._variables.sizes())
        context.note(KeptNote(context.rank, context.position.index_of(number), self._bodies, copies))
        context.board.ring_launcher()

    def look(self, across: bool = False) -> dict[str, Any]:
        """Name -> what shows that it changed, of all that could be training state and is not kept. `across`: see `sign_of`."""
        loops = [*map(names_of, script_frames())]
        by_others = self._state.python.variables
        known, held = self._variables.not_kept()
        found: dict[str, Any] = {}
        for name, value in held.items():
            if name not in by_others and not isinstance(value, PlainValues) and not self._is_fresh(name, loops):
                found[name] = sign_of(value, known, self._variables.memory, across)
        found |= {f"torch.{name}": value for name, value in _settings().items()}
        for i, optimizer in enumerate(self._state.optimizers):
            found |= {f"optimizer {i}.{name}": sign_of(value, known, None, across) for name, value in _own(optimizer).items()}
        for i, root in enumerate(self._state.modules):
            found |= {f"model {i}.{name}.hooks": count for name, part in root.named_modules() if (count := hooks_on(part))}
        return {name: sign for name, sign in found.items() if name not in self._variables.ignored}

    def _is_fresh(self, name: str, loops: list[LoopNames]) -> bool:
        """Does the script write this name anew, here or in a loop around that has gone on since the first look?"""
        return any(name in each.fresh or (self._loops > 1 and name in each.outside) for each in loops)


@functools.cache
def _of_every_optimizer() -> frozenset[str]:
    """What torch keeps in each, kept by other means or of no weight, and what its schedulers and scalers leave there."""
    left = ("_opt_called", "_step_count", "step", "grad_scale", "found_inf")
    return frozenset({*vars(torch.optim.SGD([torch.zeros(1)])), *left})


def _own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer keeps beside its groups and the state of each parameter; torch's own keep nothing there that counts."""
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    own = {} if is_torchs else {name: value for name, value in vars(optimizer).items() if name not in _of_every_optimizer()}
    return {**own, **{f"state[{key!r}]": value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}}


def _settings() -> dict[str, Any]:
    """Settings of torch in this process that change what it computes."""
    return {
        "default_dtype": str(torch.get_default_dtype()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "num_threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
