"""Name the values that the loop changes and `Variables` does not keep: without a copy, too large, or left out on request.

It compares them at the start of the first body, after the third step, and after the last step of a loop: a value that changed is
state. A replacement has another value there, so nobody may call a repaired run exact. Then the first rank of each node also
reports the values that ftrun keeps.
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
from ftrun.worker.state.protected_state import ProtectedState
from ftrun.worker.variables.loop_names import LoopNames, names_of
from ftrun.worker.variables.plain_values import PlainValues
from ftrun.worker.variables.signs import hooks_on, sign_of
from ftrun.worker.variables.variables import Variables

_SECOND_LOOK = 3  # bodies
_ABSENT = object()  # a name that was not there at the first look


class LeftOut(StepObserver):
    """Names the changing values that `variables` does not keep."""

    def __init__(self, context: Context, state: ProtectedState, variables: Variables) -> None:
        self._context = context
        self._state = state
        self._variables = variables
        variables.told = functools.partial(self._lost, why="another value since a repair")
        self._first: dict[str, Any] | None = None  # name -> sign of its value at the start of the first body
        self._loops = 0
        self._bodies = 0
        self._told: dict[str, str] = {}  # name -> why it is not kept

    def loop_started(self, first: int, length: int) -> None:
        self._loops += length > 0  # a job.call between two loops is none
        self.told_by.ignore("arrived", self)  # not at the gates of steps, where `body_started` counts

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
        """Compare and report at a loop's last gate, for which `Variables` has captured all variables."""
        self._compare()
        self._tell_kept(number)
        self.told_by.ignore("arrived", self)

    def _compare(self) -> None:
        """Name the values that changed since the start of the first body."""
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
        """Note the names for the closing line of the run."""
        self._told |= {name: self._variables.why_not(name) or why for name in names}
        self._context.note_left_out(self._told)

    def _tell_kept(self, number: int) -> None:
        """Note the kept variables for the launcher, which prints them once, and for commands that ask later."""
        context = self._context
        if context.local_rank:
            return
        copies = tuple(KeptCopy(tuple(names), size) for names, size in self._variables.sizes())
        context.note(KeptNote(context.rank, context.position.index_of(number), self._bodies, copies))
        context.board.launcher_bell.ring()

    def look(self, across: bool = False) -> dict[str, Any]:
        """Map the name of each value that could be training state and is not kept to its sign. `across`: see `sign_of`."""
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
        """Does the script bind this name anew, here or in an outer loop that has gone on since the first body?"""
        return any(name in each.fresh or (self._loops > 1 and name in each.outside) for each in loops)


@functools.cache
def _of_every_optimizer() -> frozenset[str]:
    """Return the attributes that torch, schedulers and scalers put into optimizers; these are kept elsewhere, or are no state."""
    left = ("_opt_called", "_step_count", "step", "grad_scale", "found_inf")
    return frozenset({*vars(torch.optim.SGD([torch.zeros(1)])), *left})


def _own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state beside its groups and the state of each parameter; torch's own have none there."""
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    own = {} if is_torchs else {name: value for name, value in vars(optimizer).items() if name not in _of_every_optimizer()}
    return {**own, **{f"state[{key!r}]": value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}}


def _settings() -> dict[str, Any]:
    """Return the settings of torch in this process that change its results."""
    return {
        "default_dtype": str(torch.get_default_dtype()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "num_threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
