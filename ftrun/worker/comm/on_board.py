"""Write to this rank's board cell which collective it entered last, and whether it waits in it."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from ftrun.core.shared.board import COUNTS, F, collective_word, name_word
from ftrun.worker.comm.collectives import COLLECTIVES

_NAMES = {name: name_word(name) for name in COLLECTIVES}


class OnBoard:
    """The collectives of this rank on the board. `words`: the cell's. `pending`: for each group, its pending collectives."""

    def __init__(self, words: Any) -> None:
        self.words = words
        self.pending: list[Collection[Any]] = []
        self.beginning = False  # a collective was entered, and does not count as pending yet
        self._entries: dict[tuple[int, int], int] = {}  # (group, peer) -> collectives since `handed_out`
        self._slots: dict[int, int] = {}  # group -> word of its count
        self.waited = 0  # ns that the main thread has waited in collectives

    def entered(self, name: str, group: int, peer: int = -1) -> None:
        """Note that this rank enters a collective, or waits for a message to or from `peer`.

        `group` is 0 for the world; `peer` is a rank in the world, and this rank itself stands for any. A caller whose collective will be
        pending in a moment sets `beginning` first: until then, the end of another one does not clear the wait.
        """
        words, key = self.words, (group, peer)
        self._entries[key] = number = self._entries.get(key, 0) + 1
        words[F.COLLECTIVE_NAME] = _NAMES.get(name) or name_word(name)
        words[F.PEER] = peer + 1
        # inlines `collective_word`, since a step may come here many times
        words[F.COLLECTIVE] = group << 32 | number
        if peer < 0:
            slot = self._slots.setdefault(group, len(self._slots))
            if slot < COUNTS:
                words[F.FIRST_COUNT + slot] = group << 32 | number + 1
        words[F.PROGRESS] = words[F.COLLECTIVE_SINCE] = time.monotonic_ns()

    def handed_out(self) -> None:
        """Count collectives from here, the hand-out of a step or a repair, so that a replacement counts as the others do."""
        words = self.words
        self._entries.clear()
        words[F.COUNTED] = words[F.GENERATION]
        words[F.COLLECTIVE] = words[F.PEER] = 0
        for group, slot in self._slots.items():
            if slot < COUNTS:
                words[F.FIRST_COUNT + slot] = collective_word(group, 1)

    def begun(self) -> None:
        """Note that the collective that was beginning is over already, or failed."""
        self.beginning = False
        self.left()

    def failed(self, generation: int) -> None:
        """Note that a collective of that world failed for an unknown reason, such as a closed connection. Any thread may call it."""
        self.words[F.CUT] = generation + 1

    def left(self, pended: bool = False) -> None:
        """Note that a collective is over. Any thread may call it, while the main thread may be about to begin the next.

        `pended`: it was pending, so that its end is a sign of life even if others go on.
        """
        if pended:
            self.words[F.COLLECTIVE_ENDED] = time.monotonic_ns()
        if not self.beginning and not any(self.pending):
            self.words[F.COLLECTIVE_SINCE] = 0
