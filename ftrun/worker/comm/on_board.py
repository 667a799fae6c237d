"""What this rank's board cell says of its collectives: the newest one that it entered, and whether it waits in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ftrun.core.shared.board import COUNTS, F, collective_word, name_word
from ftrun.worker.comm.collectives import COLLECTIVES

_NAMES = {name: name_word(name) for name in COLLECTIVES}


class OnBoard:
    """`words`: the cell's. `pending`: is a collective of any group under way?"""

    def __init__(self, words: Any, pending: Callable[[], bool]) -> None:
        self._words = words
        self._pending = pending
        self._beginning = False  # a collective was entered and is not pending yet
        self._entries: dict[tuple[int, int], int] = {}  # (group, peer) -> those of this iteration so far
        self._slots: dict[int, int] = {}  # group -> word of its count
        self.waited = 0  # ns that the main thread has waited in collectives

    def entered(self, name: str, group: int, peer: int = -1) -> None:
        """This rank is in that collective from now on, or waits for what it sends to or receives from `peer`.

        `group` is 0 for the world, `peer` a rank in the world; the own one stands for anybody.
        """
        words, key = self._words, (group, peer)
        self._entries[key] = number = self._entries.get(key, 0) + 1
        words[F.COLLECTIVE_NAME] = _NAMES.get(name) or name_word(name)
        words[F.PEER] = peer + 1
        words[F.COLLECTIVE] = collective_word(group, number)
        if peer < 0:
            self._count(group, number)
        words[F.COLLECTIVE_SINCE] = time.monotonic_ns()

    def _count(self, group: int, number: int) -> None:
        slot = self._slots.setdefault(group, len(self._slots))
        if slot < COUNTS:
            self._words[F.FIRST_COUNT + slot] = collective_word(group, number + 1)

    def handed_out(self) -> None:
        """Collectives are counted from the hand-out of a step or a repair, so that a replacement counts as the others do."""
        self._entries.clear()
        self._words[F.COUNTED] = self._words[F.GENERATION]
        self._words[F.COLLECTIVE] = self._words[F.PEER] = 0
        for group in self._slots:
            self._count(group, 0)

    def begins(self, name: str, group: int) -> None:
        """As `entered`, of one that counts as pending in a moment; until `begun` others that end do not say that none is."""
        self._beginning = True
        self.entered(name, group)

    def begun(self) -> None:
        """It counts as pending now, or is over already."""
        self._beginning = False
        self.left()

    def ended(self) -> None:
        """One that was pending is over: a sign of life, also when others go on. From any thread."""
        self._words[F.COLLECTIVE_ENDED] = time.monotonic_ns()
        self.left()

    def failed(self, generation: int) -> None:
        """One of that world failed, and nobody knows why yet: a connection may be closed. From any thread."""
        self._words[F.CUT] = generation + 1

    def left(self) -> None:
        """One is over. From any thread: the main thread may be about to begin the next."""
        if not self._beginning and not self._pending():
            self._words[F.COLLECTIVE_SINCE] = 0
