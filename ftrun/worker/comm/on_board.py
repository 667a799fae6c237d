"""What this rank's board cell says of its collectives: the newest one that it entered, and whether it waits in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ftrun.core.shared.board import F, collective_word, name_word
from ftrun.worker.comm.collectives import COLLECTIVES

_NAMES = {name: name_word(name) for name in COLLECTIVES}


class OnBoard:
    """`words`: the cell's. `pending`: is a collective of any group under way?"""

    def __init__(self, words: Any, pending: Callable[[], bool]) -> None:
        self._words = words
        self._pending = pending
        self._beginning = False  # a collective was entered and is not pending yet
        self._entries: dict[int, int] = {}  # group -> collectives of this iteration so far
        self.waited = 0  # ns that the main thread has waited in collectives

    def entered(self, name: str, group: int) -> None:
        """This rank is in that collective from now on; `group` is 0 for the world."""
        words = self._words
        self._entries[group] = number = self._entries.get(group, 0) + 1
        words[F.COLLECTIVE_NAME] = _NAMES.get(name) or name_word(name)
        words[F.COLLECTIVE] = collective_word(group, number)
        words[F.COLLECTIVE_SINCE] = time.monotonic_ns()

    def handed_out(self) -> None:
        """Collectives are counted from the hand-out of a step, so that a replacement counts as the others do."""
        self._entries.clear()
        self._words[F.COLLECTIVE] = 0

    def begins(self, name: str, group: int) -> None:
        """As `entered`, of one that counts as pending in a moment; until `begun` others that end do not say that none is."""
        self._beginning = True
        self.entered(name, group)

    def begun(self) -> None:
        """It counts as pending now, or is over already."""
        self._beginning = False
        self.left()

    def left(self) -> None:
        """One is over. From any thread: the main thread may be about to begin the next."""
        if not self._beginning and not self._pending():
            self._words[F.COLLECTIVE_SINCE] = 0
