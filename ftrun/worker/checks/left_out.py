"""What looks like training state and was not given to `protect`: found by looking at the script's live names, by name.

It looks at the start of the first body, after the third step, and after the last step of a loop: whatever changed between
two looks is state. A replacement has other values there, so a run that was repaired must not be called exact. Then the first
rank of each node also tells what is kept.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ftrun.core.shared import kept
from ftrun.core.shared.left_out import shown
from ftrun.worker.checks.live_values import LiveValues, attributes, has_state_dict
from ftrun.worker.runtime.frames_private import has_own_locals, locals_of
from ftrun.worker.runtime.observer import StepObserver
from ftrun.worker.runtime.run_link import Context
from ftrun.worker.state.loop_names import LoopNames, loop_names
from ftrun.worker.state.plain_values import PlainValues
from ftrun.worker.state.protected_state import ProtectedState
from ftrun.worker.state.spaces import is_open, script_frames, script_modules
from ftrun.worker.state.variables import Variables

_SECOND_LOOK = 3  # bodies
_ATOMS = (type(None), int, float, str, bytes, complex)
_ABSENT = object()  # a name that was not there at the first look


class LeftOut(StepObserver):
    """Names what `variables` does not keep.

    `given`: the objects that protect() was given; `ignore`: those that are meant to stay out, or the names of variables.
    """

    def __init__(
        self, context: Context, state: ProtectedState, variables: Variables, given: list[Any], ignore: list[Any]
    ) -> None:
        self._context = context
        self._state = state
        self._variables = variables
        variables.told = functools.partial(self._lost, why="another value since a repair")
        self._known = {id(thing) for thing in [*given, *ignore]}
        self._ignored = {name for name in ignore if isinstance(name, str)}
        self._known |= {id(t) for _, t, _ in state.params} | {id(m) for root in state.modules for m in root.modules()}
        self._known |= {id(getattr(m, n, None)) for _, m, n in state.buffers}
        self._values = LiveValues(state, self._known)
        self._names: dict[CodeType, LoopNames] = {}  # of each function of the script that is on the stack
        self._first: dict[str, Any] | None = None  # name -> digest at the first look
        self._loops = 0
        self._bodies = 0
        self._told: dict[str, str] = {}  # name -> why it is not kept

    def loop_started(self, first: int, length: int) -> None:
        self._loops += length > 0  # a job.call between two loops is none
        self.told_by.ignore("arrived", self)  # at the gates of steps: they are counted

    def body_started(self) -> None:
        self._bodies += 1
        if self._first is None:
            self._first = dict(self._look(script_frames()))
        if self._bodies == _SECOND_LOOK:
            self.told_by.ignore("body_started", self)

    def handed_out(self, number: int) -> None:
        if self._bodies == _SECOND_LOOK:
            self._compare()
            self._tell_kept(number)
            self.told_by.ignore("handed_out", self)

    def loop_ending(self, number: int) -> None:
        self._compare()
        self.told_by.listen("arrived", self)

    def arrived(self, number: int) -> None:
        """At the gate at the end of a loop: all variables were looked at for it."""
        self._tell_kept(number)
        self.told_by.ignore("arrived", self)

    def _compare(self) -> None:
        """Name what changed since the first look."""
        if self._first is None:
            return
        now = dict(self._look(script_frames()))
        changed = sorted(n for n, v in now.items() if self._first.get(n, _ABSENT) != v and n not in self._told)
        changed = [name for name in changed if not self._variables.covers(name)]
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
        told = kept.KeptValues(context.rank, context.position.index_of(number), self._bodies, self._variables.sizes())
        with contextlib.suppress(OSError):  # where there is no room for it, nobody is told
            context.report(kept.FILE, told.to_json())
            context.board.ring_launcher()

    def live(self) -> Iterator[tuple[str, str]]:
        """For `ftrun verify`: every live value that is no text, such as may differ from run to run, and what stands for it."""
        for name, value in self._look(script_frames(), across=True):
            carried = any(name in loop.carried for loop in self._names.values())
            if not isinstance(value, str | bytes) and (carried or not isinstance(value, int | float)):
                yield name, repr(value)

    # -- one look ----------------------------------------------------------------------------------------------------

    def _look(self, frames: list[FrameType], across: bool = False) -> Iterator[tuple[str, Any]]:
        """Name -> what stands for every live value that could be training state. `across`: see LiveValues.look."""
        self._values.look(across)
        for frame in frames:
            if frame.f_code not in self._names:
                self._names[frame.f_code] = _names_of(frame)
        # a thing is named as Variables names it, by the innermost function that has it
        spaces = [("", {**(mine := _locals(frame)), **self._left(frame.f_globals), **mine}) for frame in frames]
        looked_at = {id(frame.f_globals) for frame in frames}
        spaces += [(f"{n}.", dict(vars(m))) for n, m in script_modules() if id(vars(m)) not in looked_at]
        spaces.append(("torch.", _settings()))
        for i, root in enumerate(self._state.modules):
            for n, part in root.named_modules():
                own = type(part).get_extra_state is not torch.nn.Module.get_extra_state  # it says itself what it holds
                if not own and not isinstance(part, DistributedDataParallel):
                    spaces.append((f"model {i}.{n}.", attributes(part)))
        spaces += [(f"optimizer {i}.", _own(one)) for i, one in enumerate(self._state.optimizers)]
        seen: set[int] = set()
        for prefix, names in spaces:
            for name, value in names.items():
                if name.startswith(("__", ".")) or inspect.ismodule(value) or id(value) in seen:
                    continue
                if not isinstance(value, _ATOMS):
                    seen.add(id(value))
                try:
                    yield from list(self._of(prefix + name, value))
                except Exception:
                    continue
        self._values.look()  # it holds what it has looked at

    def _left(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Global variables of a script without those that job.state keeps."""
        kept = self._state.python.variables
        return {name: value for name, value in variables.items() if name not in kept}

    def _of(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, PlainValues) or id(value) in self._known or name in self._ignored or self._is_fresh(name):
            return
        if is_open(value) and not has_state_dict(value) and not isinstance(value, Iterator):
            for attribute, inner in self._values.attributes(value).items():
                if id(inner) not in self._known and f"{name}.{attribute}" not in self._ignored:
                    yield f"{name}.{attribute}", self._values.of(inner)
        else:
            yield name, self._values.of(value)

    def _is_fresh(self, name: str) -> bool:
        """Does the script write this name anew, here or in a loop around that has gone on since the first look?"""
        return any(name in n.fresh or (self._loops > 1 and name in n.outside) for n in self._names.values())


def _names_of(frame: FrameType) -> LoopNames:
    source = "".join(linecache.getlines(frame.f_code.co_filename))
    return loop_names(source, frame.f_lineno) or LoopNames(frozenset(), frozenset(), frozenset())


def _locals(frame: FrameType) -> Mapping[str, Any]:
    """A function's own variables; none of a module's code."""
    return locals_of(frame) if has_own_locals(frame) else {}


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
