"""Which optimizers stepped in which order in each body so far: what tells whether ranks do the same in their updates."""

from __future__ import annotations

import zlib
from typing import Any

_MOST = 64  # kinds of updates that are remembered


class Course:
    """Of one rank, from its first body on.

    Attributes:
        sum: Stands for the updates of all bodies.
        saved: All of it, as plain values.

    Args:
        saved: That of this rank or of its predecessor.
    """

    def __init__(self, saved: Any = None) -> None:
        self.sum = 0
        self._seen: list[list[int]] = []  # each kind of update once
        if saved is not None:
            self.sum, self._seen = saved[0], [list(one) for one in saved[1]]
        self.saved: list[Any] = [self.sum, self._seen]

    def add(self, updates: list[int]) -> None:
        """A body ended; in it these optimizers stepped."""
        self.sum = zlib.crc32(repr(updates).encode(), self.sum)
        if updates and updates not in self._seen:
            self._seen = [*self._seen[1 - _MOST :], list(updates)]
        self.saved = [self.sum, self._seen]

    def leads_to(self, updates: list[int], sums: set[int]) -> bool:
        """Has another rank, of those whose courses after these updates are `sums`, done in every body what this one did?"""
        after = Course(self.saved)
        after.add(updates)
        return after.sum in sums

    def foretells(self, began: int | None, updates: list[int], optimizers: int) -> bool:
        """May a rank of so many optimizers, of which `began` was about to step first, be taken to have meant these updates?

        It did the same once before, or there is nothing that it could have left out.
        """
        if began is None or not updates:
            return began is None and not updates
        if min(updates) < 0:
            return False  # nobody knows which optimizer that was
        return began == updates[0] and (updates in self._seen or sorted(updates) == list(range(optimizers)))
