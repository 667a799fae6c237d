"""The gate word: (generation, closed, last) in one 64-bit word, and the rules that move it.

Pure functions on integers; no clock, no I/O. The worker, the launcher and the exhaustive test all use these
and nothing else, so what the test explores is what runs. "Step" here is a gate number: the loop's step index
plus the number of loops already ended (each loop ends with a virtual gate).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_LAST_BITS = 40
_CLOSED = 1 << _LAST_BITS
_LAST_MASK = _CLOSED - 1
GENERATION_SHIFT = _LAST_BITS + 1

PASS, WAIT, STOPPED = "pass", "wait", "stopped"


class GateWord(NamedTuple):
    """generation >= 0; closed; last = number of the last opened gate, -1 before the first."""

    generation: int
    closed: bool
    last: int


def pack(word: GateWord) -> int:
    """The word as an unsigned 64-bit integer (23 bits generation, 1 bit closed, 40 bits last + 1)."""
    return (word.generation << GENERATION_SHIFT) | (_CLOSED if word.closed else 0) | (word.last + 1)


def unpack(raw: int) -> GateWord:
    """Inverse of `pack`."""
    return GateWord(raw >> GENERATION_SHIFT, bool(raw & _CLOSED), (raw & _LAST_MASK) - 1)


def arrival(generation: int, step: int) -> int:
    """The word that a rank stores in its own cell when it arrives at gate `step` in `generation` (0 = never arrived)."""
    return (generation << GENERATION_SHIFT) | (step + 1)


def verdict(raw: int, generation: int, step: int) -> str:
    """May a rank of `generation` that arrived at gate `step` go on? PASS, WAIT or STOPPED (leave the body)."""
    if raw & _LAST_MASK > step:
        return PASS
    return WAIT if raw >> GENERATION_SHIFT == generation else STOPPED


def opened(raw: int, generation: int, step: int, arrivals: Iterable[int]) -> int | None:
    """The word to swap in to open gate `step`, or None while that is not proven to be right.

    `arrivals` are the arrival fields of *every* rank of the world, read after `raw`. One beyond `step` in the same
    generation counts: a rank of another node, whose own word opened first, may be a gate ahead. On one node they are
    all equal when the gate may open.
    """
    before = (generation << GENERATION_SHIFT) | step  # not closed, last = step - 1
    if raw != before:
        return None
    least, end = arrival(generation, step), arrival(generation + 1, -1)
    for a in arrivals:
        if not least <= a < end:
            return None
    return before + 1


def closed(raw: int, generation: int) -> int | None:
    """The word to swap in to stop the world: `generation`, closed, `last` kept; None when it is that far already.

    `generation` may be more than one ahead: worlds after the loop are not closed on the gate.
    """
    word = unpack(raw)
    if generation <= word.generation:
        return None
    return pack(GateWord(generation, True, word.last))


def decided(raw: int, resume: int) -> int:
    """A closed word with the decision written back: ranks still waiting at gate `resume` - 1 then pass."""
    return pack(unpack(raw)._replace(last=resume - 1))


def reopened(raw: int, generation: int) -> int | None:
    """The word that lets `generation` run, or None when a later generation already stopped it."""
    word = unpack(raw)
    if word.generation != generation or not word.closed:
        return None
    return pack(word._replace(closed=False))
