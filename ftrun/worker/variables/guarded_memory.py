"""Memory that `protect` keeps: weights, buffers, optimizer state. A script's view of it is no value of the script's own.

`model.state_dict()`, `p.data` and `p.detach().numpy()` give other tensors and arrays over the memory of a weight. The copy of such a
view names the weight: in a replacement the view lies over the same weight again, and nothing is ever written through it.
"""

from __future__ import annotations

import bisect
from typing import Any, Protocol

import numpy as np
import torch

from ftrun.worker.memory import composed
from ftrun.worker.memory.arena import Arena, Entry, Manifest

Over = tuple[str, int]  # name of an entry in the manifest, and an offset in it, bytes


class LaidOut(Protocol):
    """The part of a rank's state that `GuardedMemory` needs."""

    manifest: Manifest

    @property
    def laid_out(self) -> bool: ...

    @property
    def arena(self) -> Arena: ...


class GuardedMemory:
    """The guarded memory of one rank, once `protect` has laid its state out."""

    def __init__(self, state: LaidOut) -> None:
        self._state = state
        self._entries: list[Entry] = []  # the manifest's entries from which the lists below were made
        self._count = 0
        self._by_name: dict[str, Entry] = {}
        self._begins: list[int] = []  # addresses, in order
        self._there: list[Entry] = []

    def over(self, thing: Any) -> Over | None:
        """Return the entry and offset that a tensor or an array lies over; None for the script's own memory."""
        if isinstance(thing, np.ndarray):
            address = thing.__array_interface__["data"][0]
        elif isinstance(thing, torch.Tensor) and composed.is_plain(thing) and thing.layout is torch.strided and thing.numel():
            address = thing.data_ptr()
        else:
            return None
        if not self._state.laid_out:
            return None
        entries = self._state.manifest.entries
        if entries is not self._entries or len(entries) != self._count:
            self._look(entries)
        number = bisect.bisect_right(self._begins, address) - 1
        if number < 0 or address >= self._begins[number] + self._there[number].block:
            return None
        return self._there[number].name, address - self._begins[number]

    def _look(self, entries: list[Entry]) -> None:
        self._entries, self._count = entries, len(entries)
        self._by_name = {entry.name: entry for entry in entries}
        pairs = sorted(((self._address(entry), entry) for entry in entries if entry.block), key=lambda pair: pair[0])
        self._begins, self._there = [address for address, _ in pairs], [entry for _, entry in pairs]

    def _address(self, entry: Entry) -> int:
        arena = self._state.arena
        return (arena.gpu_part.base if entry.on_gpu else arena.segment.address) + entry.offset

    def _block(self, name: str) -> torch.Tensor:
        """Return the block of an entry. Raises KeyError for an unknown name."""
        self._look(self._state.manifest.entries)
        entry, arena = self._by_name[name], self._state.arena
        return (arena.gpu_part if entry.on_gpu else arena.segment).block(entry.offset, entry.block)

    def tensor(self, over: Over, dtype: torch.dtype, shape: list[int], stride: list[int]) -> torch.Tensor:
        """Make a tensor over guarded memory.

        Raises:
            KeyError: If the manifest has no entry of that name.
        """
        block = self._block(over[0])
        empty = torch.empty(0, dtype=dtype, device=block.device)
        return empty.set_(block.untyped_storage(), over[1] // dtype.itemsize, shape, stride)

    def array(self, over: Over, dtype: str, shape: list[int], strides: list[int]) -> Any:
        """Make an array over guarded memory.

        Raises:
            KeyError: If the manifest has no entry of that name.
        """
        return np.ndarray(shape, dtype, self._block(over[0]).numpy(), over[1], strides)
