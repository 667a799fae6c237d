"""What looks like training state and was not given to `protect`: found by looking at the script's live names, by name.

It looks at the start of the first body, after the third step, and after the last step of a loop: whatever changed between
two looks is state. A replacement has other values there, so a run that was repaired must not be called exact.
"""

from __future__ import annotations

import inspect
import linecache
import random
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ftrun import native
from ftrun.core.errors import UsageError
from ftrun.core.shared.left_out import file_name, shown
from ftrun.worker.checks.carried import LoopNames, loop_names
from ftrun.worker.runtime.callers import is_script
from ftrun.worker.runtime.observer import StepObserver
from ftrun.worker.runtime.position import Position
from ftrun.worker.runtime.run_link import Context
from ftrun.worker.runtime.torch_private import writes_to
from ftrun.worker.state import serialization
from ftrun.worker.state.protected_state import ProtectedState

_SECOND_LOOK = 3  # bodies
_PLAIN = (int, float, str, bytes, complex, torch.Tensor, np.ndarray, list, dict, set, tuple)
_BIG = 256 << 20  # bytes of a tensor, above which only both ends are looked at: a data set, most likely
_MANY, _ENDS = 20_000, 100  # elements of a container, above which as many at both ends are looked at


class LeftOut(StepObserver):
    """`given`: the objects that protect() was given; `ignore`: those that are meant to stay out, or the names of variables."""

    def __init__(self, context: Context, state: ProtectedState, given: list[Any], ignore: list[Any]) -> None:
        self._context = context
        self._position: Position = context.position
        self._state = state
        self._known = {id(thing) for thing in [*given, *ignore]}
        self._ignored = {name for name in ignore if isinstance(name, str)}
        self._known |= {id(t) for _, t, _ in state.params} | {id(m) for root in state.modules for m in root.modules()}
        self._known |= {id(getattr(m, n, None)) for _, m, n in state.buffers}
        self._loops: dict[CodeType, LoopNames] = {}  # of each function of the script that is on the stack
        self._first: dict[str, Any] | None = None  # name -> digest at the first look
        self._bodies = 0
        self._told: set[str] = set()

    def body_started(self) -> None:
        self._bodies += 1
        if self._first is None:
            self._first = dict(self._look(list(_script_frames())))

    def handed_out(self, number: int) -> None:
        if self._bodies == _SECOND_LOOK:
            self._compare()

    def loop_ending(self, number: int) -> None:
        self._compare()

    def _compare(self) -> None:
        """Name what changed since the first look."""
        if self._first is None:
            return
        now = dict(self._look(list(_script_frames())))
        changed = sorted(n for n, v in now.items() if self._first.setdefault(n, v) != v and n not in self._told)
        if not changed:
            return
        self._told.update(changed)
        context = self._context
        context.report(file_name(context.cell.index), {"names": sorted(self._told)})
        if context.rank == 0:
            print(
                f"ftrun: not given to protect(), and changed by the loop: {shown(changed)}; after a repair a rank may go on with "
                "other values. Give what has a state_dict() or is a torch.Generator to protect(name=...), and what is meant to stay out, "
                "or the name of its variable, to protect(..., ignore=[...])",
                file=sys.stderr,
                flush=True,
            )

    def live(self) -> Iterator[tuple[str, str]]:
        """For `ftrun verify`: every live value that is no text, such as may differ from run to run, and what stands for it."""
        for name, value in self._look(list(_script_frames())):
            carried = any(name in loop.carried for loop in self._loops.values())
            if not isinstance(value, str | bytes) and (carried or not isinstance(value, int | float)):
                yield name, repr(value)

    # -- one look ----------------------------------------------------------------------------------------------------

    def _look(self, frames: list[FrameType]) -> Iterator[tuple[str, Any]]:
        """Name -> digest of every live value that could be training state."""
        seen: set[int] = set()
        for frame in frames:
            if frame.f_code not in self._loops:
                self._loops[frame.f_code] = _names_of(frame)
            at_top = frame.f_code.co_name == "<module>"
            values = dict(frame.f_globals) if at_top else {**frame.f_globals, **frame.f_locals}
            for name, value in values.items():
                if name.startswith("__") or id(value) in seen:
                    continue
                if not isinstance(value, _PLAIN):
                    seen.add(id(value))
                try:
                    yield from list(self._of(name, value, deep=True))
                except Exception:
                    continue

    def _is_fresh(self, name: str) -> bool:
        return any(name in loop.fresh for loop in self._loops.values())

    def _of(self, name: str, value: Any, deep: bool) -> Iterator[tuple[str, Any]]:
        if id(value) in self._known or name in self._ignored or self._is_fresh(name):
            return
        if isinstance(value, _PLAIN):
            yield name, self._digest(value)
        elif isinstance(value, torch.Generator):
            yield name, self._digest(value.get_state())
        elif isinstance(value, random.Random):
            yield name, hash(value.getstate())
        elif type(value).__module__.startswith("numpy.random") and hasattr(value, "bit_generator"):
            yield name, repr(value.bit_generator.state)
        elif isinstance(value, DataLoader):
            yield from self._of(f"{name}.dataset", value.dataset, deep)
        elif inspect.isfunction(value):
            yield from self._in_function(name, value)
        elif inspect.ismodule(value) or inspect.isclass(value):
            return
        elif hasattr(value, "state_dict"):
            yield name, self._state_of(value)
        elif deep and hasattr(value, "__dict__") and not _of_a_library(type(value)):
            for attribute, inner in vars(value).items():
                yield from self._of(f"{name}.{attribute}", inner, deep=False)

    def _in_function(self, name: str, function: Any) -> Iterator[tuple[str, Any]]:
        """What a function of the script closes over, and what was hung on it."""
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        kept = {variable: cell.cell_contents for variable, cell in cells if _is_filled(cell)} | vars(function)
        for inner, value in kept.items() if is_script(function.__code__.co_filename) else ():
            yield from self._of(f"{name}.{inner}", value, deep=False)

    def _digest(self, value: Any) -> Any:
        """What stands for a value: equal when it is, as far as that can be seen. Tensors that are guarded stand for nothing."""
        if isinstance(value, int | float | str | bytes | complex):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor_digest(value)
        if isinstance(value, np.ndarray):
            return self._tensor_digest(torch.from_numpy(value)) if not value.dtype.hasobject else None
        if isinstance(value, dict):
            value = [part for key, inner in value.items() for part in (str(key), inner)]
        if isinstance(value, list | tuple):
            ends = value if len(value) <= _MANY else [*value[:_ENDS], *value[-_ENDS:]]
            return len(value), [self._digest(inner) for inner in ends]
        if isinstance(value, set):
            return len(value)
        try:
            return serialization.pack(value, "")
        except UsageError:
            return None

    def _tensor_digest(self, tensor: torch.Tensor) -> Any:
        if id(tensor) in self._known or tensor.layout is not torch.strided or tensor.is_meta:
            return None
        segment = self._state.arena.segment
        if segment.address <= tensor.data_ptr() < segment.address + segment.length:
            return None
        if not tensor.is_cpu:
            return tensor.data_ptr(), writes_to(tensor)
        if tensor.numel() * tensor.element_size() > _BIG:
            flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach()[0]
            return (
                tuple(tensor.shape),
                writes_to(tensor),
                float(flat[:_ENDS].double().sum()),
                float(flat[-_ENDS:].double().sum()),
            )
        data = tensor.detach().contiguous()
        size = data.numel() * data.element_size()
        return tuple(data.shape), native.checksum(data.data_ptr(), size, 0) if size else 0

    def _state_of(self, value: Any) -> Any:
        """Digest of a state_dict(), without tensors that are protected themselves."""
        try:
            return self._digest(value.state_dict())
        except Exception:  # the script's own code: what it cannot say is not looked at
            return None


def _names_of(frame: FrameType) -> LoopNames:
    source = "".join(linecache.getlines(frame.f_code.co_filename))
    return loop_names(source, frame.f_lineno) or LoopNames(frozenset(), frozenset())


def _script_frames() -> Iterator[FrameType]:
    """The script's frames, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        if is_script(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _of_a_library(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is None or not is_script(file)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
