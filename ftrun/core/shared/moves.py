"""When a worker moved which part of a state: the file that it leaves for the launcher. For people; decides nothing.

The stages are those of figure 004. What another rank broadcast is copied from the shared buffer straight to where it belongs,
so receiving it and writing it into the weights are one piece of work: BROADCAST_DST.
"""

from __future__ import annotations

from typing import NamedTuple

H2D, BROADCAST_SRC, BROADCAST_DST, RELOAD = "h2d", "broadcast_src", "broadcast_dst", "reload"

PREFIX = "moves-"  # of their names


class Move(NamedTuple):
    """One piece of work. `source`: the rank whose bytes they were. Times in ns (CLOCK_MONOTONIC)."""

    stage: str
    source: int
    begin: int
    end: int


def file_name(cell: int, generation: int) -> str:
    """Without folder and suffix, see Context.report."""
    return f"{PREFIX}{cell}-{generation}"


def generation_of(name: str) -> int:
    """The generation in a `file_name`."""
    return int(name.rpartition("-")[2])
