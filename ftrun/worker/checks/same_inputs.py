"""A step that is done again must get the inputs of the first try: digests of what the protected models are called with.

They stand on the board as well, so that a replacement can be compared with the rank that it took over.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ftrun.core.shared.board import F, Inexact, inputs_of, inputs_word
from ftrun.worker.runtime.observer import StepObserver
from ftrun.worker.runtime.run_link import Context
from ftrun.worker.runtime.trees import checksum, leaves


class SameInputs(StepObserver):
    """Chains a digest over the calls of a body. Tensors on a GPU are not read: that would wait for the device."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._words = context.cell.words()
        self._digest = 0
        self._calls = 0
        self._seen: dict[int, int] = {}  # calls -> digest after them, of the first try of the step `_number`
        self._number = -1

    def body_started(self) -> None:
        position = self._context.position
        self._digest = self._calls = 0
        if position.attempt == 0:
            self._seen = {}
            self._number = position.number

    def model_called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        number = self._context.position.number
        digest = self._digest
        for leaf in args if not kwargs and {*map(type, args)} == {torch.Tensor} else leaves([args, kwargs]):
            digest = _chained(leaf, digest)
        self._digest = digest
        self._calls += 1
        self._words[F.INPUTS] = digest
        self._words[F.INPUTS_AT] = inputs_word(number, self._calls)
        if number != self._number:
            return
        if self._seen.setdefault(self._calls, self._digest) != self._digest:
            self._seen[self._calls] = self._digest
            self._differs(number)

    def replaced(self) -> None:
        """What the predecessor's models were called with in the step that comes next, if it was in it."""
        context = self._context
        lost = (context.world.lost or {}).get(str(context.rank)) if context.world is not None else None
        if lost is not None:
            cell = context.board.cell(lost)
            self._number, calls = inputs_of(cell[F.INPUTS_AT])
            self._seen = {calls: cell[F.INPUTS]}

    def _differs(self, number: int) -> None:
        context = self._context
        context.note_inexact(Inexact.OTHER_INPUTS)
        print(
            f"ftrun: rank {context.rank}, step {context.position.index_of(number)}: the model was called with other inputs than when "
            "this step was done first (a batch that was fetched ahead, or a position that protect() does not know?); fetch inside "
            "the loop from job.batches(loader), or by step.index",
            file=sys.stderr,
            flush=True,
        )


def _chained(leaf: Any, digest: int) -> int:
    if isinstance(leaf, torch.Tensor):
        value = checksum(leaf, digest)
        return digest if value is None else value
    if isinstance(leaf, np.ndarray):
        return _chained(torch.from_numpy(leaf), digest) if leaf.dtype.kind in "iuf" else digest
    if isinstance(leaf, int | float | str | bytes | None):
        return zlib.crc32(repr(leaf).encode(), digest & 0xFFFFFFFF) | digest & ~0xFFFFFFFF
    return digest
