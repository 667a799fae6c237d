"""What this rank's board cell says of its collectives: the newest one that it entered, and whether it waits in it."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from ftrun.core.shared.board import COUNTS, F, collective_word, name_word
from ftrun.worker.comm.collectives import COLLECTIVES

_NAMES = {name: name_word(name) for name in COLLECTIVES}


class OnBoard:
    """`words`: the cell's. `pending`: of each group, the collectives that are under way."""

    def __init__(self, words: Any) -> None:
        self.words = words
        self.pending: list[Collection[Any]] = []
        self.beginning = False  # a collective was entered, and does not count as pending yet
        self._entries: dict[tuple[int, int], int] = {}  # (group, peer) -> those of this iteration so far
        self._slots: dict[int, int] = {}  # group -> word of its count
        self.waited = 0  # ns that the main thread has waited in collectives

    def entered(self, name: str, group: int, peer: int = -1) -> None:
        """This rank is in that collective from now on, or waits for what it sends to or receives from `peer`.

        `group` is 0 for the world, `peer` a rank in the world; the own one stands for anybody. Whoever sets `beginning` before has one
        that counts as pending in a moment: until then others that end do not say that none is.
        """
        words, key = self.words, (group, peer)
        self._entries[key] = number = self._entries.get(key, 0) + 1
        words[F.COLLECTIVE_NAME] = _NAMES.get(name) or name_word(name)
        words[F.PEER] = peer + 1
        # as `collective_word` makes them; a step may be here many times
        words[F.COLLECTIVE] = group << 32 | number
        if peer < 0:
            slot = self._slots.setdefault(group, len(self._slots))
            if slot < COUNTS:
                words[F.FIRST_COUNT + slot] = group << 32 | number + 1
        words[F.PROGRESS] = words[F.COLLECTIVE_SINCE] = time.monotonic_ns()

    def handed_out(self) -> None:
        """Collectives are counted from the hand-out of a step or a repair, so that a replacement counts as the others do."""
        words = self.words
        self._entries.clear()
        words[F.COUNTED] = words[F.GENERATION]
        words[F.COLLECTIVE] = words[F.PEER] = 0
        for group, slot in self._slots.items():
            if slot < COUNTS:
                words[F.FIRST_COUNT + slot] = collective_word(group, 1)

    def begun(self) -> None:
        """It is over already, or failed."""
        self.beginning = False
        self.left()

    def failed(self, generation: int) -> None:
        """One of that world failed, and nobody knows why yet: a connection may be closed. From any thread."""
        self.words[F.CUT] = generation + 1

    def left(self, pended: bool = False) -> None:
        """One is over. From any thread: the main thread may be about to begin the next.

        `pended`: it was pending, so that its end is a sign of life, also when others go on.
        """
        if pended:
            self.words[F.COLLECTIVE_ENDED] = time.monotonic_ns()
        if not self.beginning and not any(self.pending):
            self.words[F.COLLECTIVE_SINCE] = 0
