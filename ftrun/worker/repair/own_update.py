"""A rank that is nobody's replica died at its gate, and the others went on: its update is made in its place, from sealed gradients.

Weights and optimizer state are those from before the update, in its own arena. See update_region.py for what a rank leaves.
"""

from __future__ import annotations

from ftrun.core.shared.board import Head
from ftrun.worker.memory.arena import OPEN, Arena
from ftrun.worker.repair.completed import Newest, ends_of
from ftrun.worker.repair.course import Course
from ftrun.worker.repair.kit import Kit
from ftrun.worker.repair.rank_state import RankState, read_state
from ftrun.worker.repair.recovery_points import END, GATE, SEALED, Slots
from ftrun.worker.repair.sources import PEER, SNAPSHOTS, NoSource, note_draws, take_changed
from ftrun.worker.state import serialization

_NOBODY = "no rank completed the update before step {}: all of them died in it"


def is_at_hand(kit: Kit, own: Arena, resume: int) -> bool:
    """Is the dead rank's memory as of the start of the resume step, or can the update that it lacks be made?"""
    return _is_whole(kit, own, resume) or _can_be_made(kit, own, resume)


def _is_whole(kit: Kit, own: Arena, resume: int) -> bool:
    if kit.ledger.region.alone and own.seal == OPEN and not own.has_gpu and kit.ledger.slots.tag(END) == resume:
        own.sealed(resume)  # it died between the END slot of its update and this
    return own.seal == resume


def _can_be_made(kit: Kit, own: Arena, resume: int) -> bool:
    """Did a rank without replica die at the gate before the resume step?"""
    before = resume - 1
    return before >= 0 and kit.ledger.region.alone and own.seal == before == kit.ledger.slots.tag(GATE)


def make(kit: Kit, resume: int, newest: Newest) -> None:
    """Make the update before the resume step.

    Raises:
        NoSource
        Superseded
    """
    state, slots = kit.state, kit.ledger.slots
    ends = [end for one in _ends(kit, resume, newest) if (end := read_state(one, END)).alone]
    if not ends:
        raise NoSource(_NOBODY.format(resume), requeue=True, remedies=(SNAPSHOTS,))
    if len({repr((end.updates, end.kept)) for end in ends}) > 1 or not all(end.plain for end in ends):
        raise NoSource(
            "it died at its gate, after which comes more than the updates of protected optimizers, or not the same on every rank, so that "
            "nobody can make its update",
            requeue=True,
            remedies=(SNAPSHOTS,),
        )
    saved, updates = read_state(slots, GATE), ends[0].updates
    course, sums = Course(saved.course), {end.course[0] for end in ends}
    if not course.foretells(saved.began, updates, len(state.optimizers)) or not course.leads_to(updates, sums):
        raise NoSource(
            "it died at its gate, after which the other ranks' optimizers stepped otherwise than its own did before, so that nobody "
            "knows which updates it lacks",
            requeue=True,
            remedies=(SNAPSHOTS,),
        )
    if updates:
        if slots.tag(SEALED) != resume - 1:
            raise NoSource("its gradients were not sealed when it died at its gate", requeue=True, remedies=(SNAPSHOTS,))
        state.python.apply(saved.python)
        state.set_grads(saved.alive, serialization.decode(slots.sound(SEALED)))
        state.arena.open()
        for number in updates:
            state.optimizers[number].step()
        state.absorb()
        kit.context.board[Head.MADE] = 1
    state.arena.sealed(resume)


def apply_to(saved: RankState, kit: Kit, resume: int, newest: Newest) -> RankState:
    """`saved`, the GATE slot of such a rank, as of the end of its update.

    Raises:
        NoSource
        Superseded
    """
    slots, *others = _ends(kit, resume, newest)
    after = read_state(slots, END)
    buffers = {entry.name for entry in kit.state.manifest.entries if entry.zone == "volatile"}
    written = buffers & {*after.buffers, *saved.ever}
    if written:
        raise NoSource(
            f"{min(written)} is written after optimizer.step(), which this rank did not complete, and no other rank has its values",
            requeue=True,
            remedies=(SNAPSHOTS,),
        )
    take_changed(kit, saved, after, others, resume)
    note_draws(kit.context, saved, after)
    alone = next(end for one in (slots, *others) if (end := read_state(one, END)).alone)  # `make` found one
    course = Course(saved.course)
    course.add(alone.updates)
    saved.course = course.saved
    if alone.updates:
        if not alone.kept:
            saved.alive = [False] * len(saved.alive)
        kept = alone.kept and alone.grads is not None
        saved.grads = bytes(kit.ledger.slots.sound(SEALED)) if kept else None
    return saved


def _ends(kit: Kit, resume: int, newest: Newest) -> list[Slots]:
    """The slots of all ranks that completed the update before the resume step.

    Raises:
        NoSource
        Superseded
    """
    world = kit.context.world
    assert world is not None
    done, in_time = ends_of(kit.context, set(range(world.size)) - {kit.context.rank}, resume, newest)
    if not in_time:
        raise NoSource(f"not every rank completed the update before step {resume} within {PEER:.0f} s", requeue=True)
    if not done:
        raise NoSource(_NOBODY.format(resume), requeue=True, remedies=(SNAPSHOTS,))
    return done
