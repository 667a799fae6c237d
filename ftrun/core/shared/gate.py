"""The gate word: (generation, closed, undecided, last) in one 64-bit word, and the rules that move it.

Theory of operation. A rank stores its arrival in its cell. When all ranks of the world have arrived at gate `last` + 1, one of them swaps
in the word with `last` + 1, and every rank whose gate is at most `last` passes. The launcher stops the world with a closed word of
a later generation, in which no gate opens: a waiting rank then leaves its body. All ranks read the same `last` from a closed word, so a
step passes on all ranks or on none. The launcher then lets the new generation run (`reopened`); for a rollback it first moves `last`
back (`decided`).

On several nodes each has a word of its own, and one may have opened a gate more than another. So a word is closed `undecided`: a rank
that waits at its gate stays there. Once the nodes agree, the launcher writes the common `last` into the word (`decided`), and the rank
passes or leaves.

These are pure functions on integers, without clock or I/O. The worker, the launcher and the exhaustive test use these and nothing else, so
the test explores the code that runs. "Step" here is a gate number: the loop's step index plus the number of virtual gates before it (each
loop ends with one).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_LAST_BITS = 39
_LAST_MASK = (1 << _LAST_BITS) - 1
_UNDECIDED = 1 << _LAST_BITS
_CLOSED = 1 << _LAST_BITS + 1
GENERATION_SHIFT = _LAST_BITS + 2

PASS, WAIT, STOPPED = "pass", "wait", "stopped"


class GateWord(NamedTuple):
    """generation >= 0; closed; last = number of the last opened gate, -1 before the first; undecided: `last` may still grow."""

    generation: int
    closed: bool
    last: int
    undecided: bool = False


def pack(word: GateWord) -> int:
    """Pack the word into an unsigned 64-bit integer (23 bits generation, 1 bit closed, 1 bit undecided, 39 bits last + 1)."""
    flags = (_CLOSED if word.closed else 0) | (_UNDECIDED if word.undecided else 0)
    return (word.generation << GENERATION_SHIFT) | flags | (word.last + 1)


def unpack(raw: int) -> GateWord:
    """Invert `pack`."""
    return GateWord(raw >> GENERATION_SHIFT, bool(raw & _CLOSED), (raw & _LAST_MASK) - 1, bool(raw & _UNDECIDED))


def arrival(generation: int, step: int) -> int:
    """Return the word that a rank stores in its own cell when it arrives at gate `step` in `generation` (0 = never arrived)."""
    return (generation << GENERATION_SHIFT) | (step + 1)


def verdict(raw: int, generation: int, step: int) -> str:
    """Return PASS, WAIT or STOPPED (leave the body) for a rank of `generation` that arrived at gate `step`."""
    if raw & _LAST_MASK > step:
        return PASS
    return WAIT if raw >> GENERATION_SHIFT == generation or raw & _UNDECIDED else STOPPED


def opened(raw: int, generation: int, step: int, arrivals: Iterable[int]) -> int | None:
    """Return the word to swap in to open gate `step`, or None while the gate must stay shut.

    `arrivals` are the arrival fields of *every* rank of the world, read after `raw`. An arrival beyond `step` in the same
    generation counts: a rank of another node, whose own word opened first, may be a gate ahead. On one node all
    arrivals are equal when the gate may open.
    """
    before = (generation << GENERATION_SHIFT) | step  # not closed, last = step - 1
    if raw != before:
        return None
    least, end = arrival(generation, step), arrival(generation + 1, -1)
    for a in arrivals:
        if not least <= a < end:
            return None
    return before + 1


def closed(raw: int, generation: int, undecided: bool = False) -> int | None:
    """Return the word that stops the world: `generation`, closed, the same `last`; None if the word has that generation already.

    `generation` may be more than one ahead: worlds after the loop are not closed on the gate. `undecided`: on one of several nodes.
    """
    word = unpack(raw)
    if generation <= word.generation:
        return None
    return pack(GateWord(generation, True, word.last, undecided))


def decided(raw: int, resume: int) -> int:
    """Return a closed word whose last opened gate is `resume` - 1: gates from `resume` on count as not opened, earlier ones pass."""
    return pack(unpack(raw)._replace(last=resume - 1, undecided=False))


def reopened(raw: int, generation: int) -> int | None:
    """Return the word that lets `generation` run, or None if a later generation stopped it, or it runs already."""
    word = unpack(raw)
    if word.generation != generation or not word.closed or word.undecided:
        return None
    return pack(word._replace(closed=False))
