"""What a slot holds: everything of a rank that is not in its arena, as of one moment of a step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from ftrun.worker.repair.recovery_points import Slots
from ftrun.worker.state import rng
from ftrun.worker.state.histories import whole
from ftrun.worker.state.variables import PREFIX

IN_UPDATE, BETWEEN = 1, 2  # in some update region, and after a body, before the next


@dataclass
class RankState:
    """All of it are plain values: numbers, strings, bytes, and lists, tuples and dicts of them.

    The update region's facts are those of UpdateRegion: `updates`, `began`, `plain`, `alone`, `kept`, `usual`, `gave_up`.
    """

    streams: rng.State
    python: dict[str, bytes]  # Python state, packed
    alive: list[bool]  # which gradients there are
    grads: bytes | None  # those that the next body adds to, packed
    loader: Any  # the place of job.batches
    updated: bool  # the last complete body updated
    updates: list[int]
    began: int | None
    plain: bool
    alone: bool
    kept: bool
    usual: list[int] | None
    gave_up: bool
    sums: list[int] | None  # of the gradients at the gate, where replicas rest on the script's word
    drew: int  # where random numbers were drawn so far that a replacement would not draw: IN_UPDATE, BETWEEN
    ever: list[str]  # what some update region changed so far: Python state and buffers
    stands: dict[str, int]  # of the buffers among `ever`, what stands for their values; in an END slot as of the gate before
    # of an END slot: what its update region changed
    changed: dict[str, bytes | None] = field(default_factory=dict)  # of the Python state, and what it was at the gate
    buffers: list[str] = field(default_factory=list)


fields_of = attrgetter(*(one.name for one in dataclasses.fields(RankState)))
"""fields_of(state) -> its fields in order: packed plainly, they are what `read_state` reads."""


def read_state(slots: Slots, slot: int) -> RankState:
    """What a rank's START, GATE or END slot holds.

    Raises:
        Damaged
    """
    state = RankState(*slots.read(slot))
    for values in (state.python, state.changed):
        for name, data in values.items():
            if name.startswith(PREFIX) and data is not None:
                values[name] = whole(data, slots.histories)
    return state
