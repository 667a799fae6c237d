"""The content of a slot: everything of a rank that is not in its arena, as of one moment of a step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from ftrun.worker.repair.recovery_points import Slots
from ftrun.worker.state import rng
from ftrun.worker.variables.histories import whole
from ftrun.worker.variables.variables import PREFIX

IN_UPDATE, BETWEEN = 1, 2  # in an update region, and between two bodies


@dataclass
class RankState:
    """A slot's content in plain values: numbers, strings, bytes, and lists, tuples and dicts of them.

    The update region's facts are those of UpdateRegion: `updates`, `began`, `plain`, `alone`, `kept`, `usual`, `gave_up`.
    """

    streams: rng.State
    python: dict[str, bytes]  # Python state, packed
    alive: list[bool]  # which gradients exist
    grads: bytes | None  # the gradients that the next body adds to, packed
    loader: Any  # the place of job.batches
    updated: bool  # the last complete body updated
    updates: list[int]
    began: int | None
    plain: bool
    alone: bool
    kept: bool
    usual: list[int] | None
    gave_up: bool
    sums: list[int] | None  # of the gradients at the gate, where replicas rest on the script's declaration
    drew: int  # where the rank has drawn random numbers that a replacement would not draw: IN_UPDATE, BETWEEN
    ever: list[str]  # Python state and buffers that any update region has changed so far
    stands: dict[str, int]  # checksums of the buffers among `ever`; in an END slot as of the gate before
    # in an END slot: the changes of its update region
    changed: dict[str, bytes | None] = field(default_factory=dict)  # changed Python state, with its value at the gate
    buffers: list[str] = field(default_factory=list)


fields_of = attrgetter(*(one.name for one in dataclasses.fields(RankState)))
"""fields_of(state) -> its fields in order: packed plainly, they are what `read_state` reads."""


def read_state(slots: Slots, slot: int) -> RankState:
    """Read a rank's START, GATE or END slot.

    Raises:
        Damaged
    """
    state = RankState(*slots.read(slot))
    for values in (state.python, state.changed):
        for name, data in values.items():
            if name.startswith(PREFIX) and data is not None:
                values[name] = whole(data, slots.histories)
    return state
