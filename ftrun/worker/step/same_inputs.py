"""Check by digests that a step that is done again calls the protected models with the inputs of its first try.

The board holds the digests, too, so that a replacement compares itself with its predecessor. If a rank died or was stopped before it
called a model in the step that comes next, there is nothing to compare. Then the rank begins a step twice: inputs that come from kept
values are the same again, and those from elsewhere (a connection, a queue, a service) are not. The script's code after a left body
may read names that bodies bind. If none has bound them yet, the rank begins the step after that one twice.
"""

from __future__ import annotations

import atexit
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ftrun.core.shared.board import F, Inexact, inputs_of, inputs_word
from ftrun.worker.link.callers import script_frames
from ftrun.worker.link.observer import StepObserver
from ftrun.worker.link.position import Again
from ftrun.worker.link.run_link import Context
from ftrun.worker.link.trees import content, leaves, sketch
from ftrun.worker.step.behind import reads_unbound

_OTHERS = (
    "the model was called with other inputs than when this step was done first (a batch that was fetched ahead, or a position that "
    "protect() does not know?)"
)
_UNKNOWN = (
    "begun twice after a repair, the step called the model with other inputs the second time, so they do not come from what is kept "
    "(a connection, a queue, a service?), and this rank's may not be those of an uninterrupted run"
)
_UNASKED = (
    "it died or was stopped before it called the model, and no step came after that in which its inputs could be asked for twice, so "
    "nobody knows whether they come from what is kept"
)
_CURE = "fetch inside the loop from job.batches(loader), or by step.index"


class SameInputs(StepObserver):
    """Chains a digest over the calls of a body. It does not read tensors on a GPU: that would wait for the device.

    It reads a sample spread over a large tensor: another batch differs there as well.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._words = context.cell.words()
        self._digest = 0
        self._calls = 0
        self._seen: dict[int, int] = {}  # calls -> digest after them, in the first try of the step `_number`
        self._number = -1
        self._doubted = False  # nobody knows the inputs of the first try of the step that comes next, or that runs
        self._asked: tuple[int, int] | None = None  # of a step begun once: gate number, and digest of its first call's inputs
        self._first: int | None = None  # the first step that this process began in this loop
        self._unasked = -1  # index of a step that this rank did not begin twice, though nobody knows its inputs
        atexit.register(self._exit)

    def loop_started(self, first: int, length: int) -> None:
        if length:  # a job.call is none
            self._first = None

    def body_started(self) -> None:
        position = self._context.position
        number = position.number
        self._digest = self._calls = 0
        if self._first is None:
            self._first = number
        went_back = number < self._number  # to the host snapshot
        if position.attempt == 0 or number != self._number:
            self._seen = {}
            self._number = number
        self._doubted = self._doubted or went_back or (position.attempt > 0 and not self._seen)

    def model_called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        number = self._context.position.number
        digest = self._digest
        for leaf in args if not kwargs and {*map(type, args)} == {torch.Tensor} else leaves([args, kwargs]):
            digest = _chained(leaf, digest)
        self._digest = digest
        self._calls += 1
        self._words[F.INPUTS] = digest
        self._words[F.INPUTS_AT] = inputs_word(number, self._calls)
        if self._doubted and self._calls == 1:
            if number != self._first or not reads_unbound(script_frames(), _is_entered):
                self._begin_twice(number, [args, kwargs])
            else:
                self._unasked = self._context.position.index_of(number)
        if self._seen.setdefault(self._calls, self._digest) != self._digest:
            self._seen[self._calls] = self._digest
            self._tell(self._context.position.index_of(number), Inexact.OTHER_INPUTS, _OTHERS)

    def replaced(self) -> None:
        """Read from the board the digest of the predecessor's inputs in the step that comes next, if it was in that step."""
        context = self._context
        world = context.world
        number, calls, digest = -1, 0, 0
        if (cell := context.predecessor()) is not None:
            (number, calls), digest = inputs_of(cell[F.INPUTS_AT]), cell[F.INPUTS]
        # a digest of nothing (all inputs were on a GPU) does not count
        self._doubted = world is None or number != world.resume or not digest
        if not self._doubted:
            self._number, self._seen = number, {calls: digest}

    def _begin_twice(self, number: int, inputs: list[Any]) -> None:
        """Begin a step twice, whose first inputs nobody knows, and compare both. Raises Again, once."""
        asked, self._asked = self._asked, None
        if self._words[F.COLLECTIVE] or self._context.position.called:
            # others would not take part again, or an evaluation would run twice: the source of the inputs stays unknown
            self._doubted = False
            return
        digest = 0
        for leaf in leaves(inputs):
            digest = _chained(leaf, digest, from_device=True)
        if asked is None or asked[0] != number:
            self._asked = number, digest
            raise Again
        self._doubted = False
        if asked[1] != digest:
            self._tell(self._context.position.index_of(number), Inexact.INPUTS_UNKNOWN, _UNKNOWN)

    def _exit(self) -> None:
        """Report, when the script ends, a step whose inputs stayed unchecked."""
        if self._doubted and self._unasked >= 0 and self._context.is_main_process():
            self._tell(self._unasked, Inexact.INPUTS_UNASKED, _UNASKED)

    def _tell(self, index: int, why: Inexact, what: str) -> None:
        context = self._context
        context.note_inexact(why)
        where = f"rank {context.rank}, step {index}"
        print(f"ftrun: {where}: {what}; {_CURE}", file=sys.stderr, flush=True)


def _is_entered(value: Any) -> bool:
    """Is this value a step whose body the script has entered?"""
    return getattr(value, "entered", False) is True


def _chained(leaf: Any, digest: int, from_device: bool = False) -> int:
    """Add a leaf to the digest. `from_device`: read a plain tensor on a GPU, too, which waits for the device."""
    if isinstance(leaf, torch.Tensor):
        value = content(leaf, digest) if from_device and leaf.is_cuda and type(leaf) is torch.Tensor else sketch(leaf, digest)
        return digest if value is None else value
    if isinstance(leaf, np.ndarray):
        return _chained(torch.from_numpy(leaf), digest) if leaf.dtype.kind in "iuf" else digest
    if isinstance(leaf, int | float | str | bytes | None):
        return zlib.crc32(repr(leaf).encode(), digest & 0xFFFFFFFF) | digest & ~0xFFFFFFFF
    return digest
