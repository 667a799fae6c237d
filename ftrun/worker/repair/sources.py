"""Take what a replaced rank lacks from another rank's slots, and note what no rank knows any more."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from ftrun.core.errors import WorkerError
from ftrun.core.shared import gate
from ftrun.core.shared.board import Inexact
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory import serialization
from ftrun.worker.repair.handover import fetch
from ftrun.worker.repair.kit import Kit
from ftrun.worker.repair.memories import donors, own_slots
from ftrun.worker.repair.plan import KEPT, Refusal
from ftrun.worker.repair.rank_state import BETWEEN, IN_UPDATE, RankState, read_state
from ftrun.worker.repair.recovery_points import END, GATE, START, Slots
from ftrun.worker.variables.variables import PREFIX, WHOLE


class NoSource(WorkerError):
    """No rung of the ladder holds for this rank.

    Args:
        refusal: Why, and what would have helped.
    """

    def __init__(self, refusal: Refusal | str) -> None:
        self.refusal = Refusal(refusal) if isinstance(refusal, str) else refusal
        super().__init__(self.refusal.why)


def resume_of(context: Context) -> int:
    """Return the gate number at which this replacement goes on."""
    world = context.world
    if world is None:
        raise WorkerError("a replacement without a world")
    return gate.unpack(context.board.gate()).last + 1 if world.tail else world.resume


def read_log(context: Context) -> list[dict[str, Any]]:
    """Read the results of the replaced rank's collectives before its first step and between its loops.

    Raises:
        NoSource
        Damaged
    """
    segment = own_slots(context)
    span = context.world.span if context.world is not None else None
    mirrored = context.predecessor() is None and span is not None and span.mirrored
    slots: Slots | None = None
    if segment is not None:
        context.mapped[(context.rank, "slots")] = segment
        slots = Slots(segment)
    elif not mirrored:  # a rank of a lost node, whose siblings are as new as it is
        slots = _slots_of_another(context)  # the fd store that had this rank's slots died with it
    if slots is None and mirrored:
        why = "nobody has this rank's slots: its node is lost, and so is the one that mirrored them (or no gate had opened yet)"
        raise NoSource(Refusal(why, requeue=True))
    if slots is None:
        raise NoSource("the fd store has no slots of this rank (its fd store died, or the rank died before protect)")
    return list(map(serialization.decode, slots.log.records()))


def _slots_of_another(context: Context) -> Slots | None:
    """Return the slots of the first rank whose slots the new fd store has: the survivors hand them to it."""
    world, deadline = context.world, time.monotonic() + KEPT
    while world is not None and time.monotonic() < deadline:
        seen = context.board.worker_bell.count()
        for rank in donors(context.board, world, context.rank):
            segment = fetch(context, rank, "slots")
            if segment is not None:
                return Slots(segment)
        context.board.worker_bell.wait(seen, 0.05)
    return None


def parted(mine: Slots, theirs: Slots, resume: int) -> bool:
    """Did this rank and another one apply different gradients in the update before the resume step?

    This checks ranks that only the script declares replicas: if they did, the other rank's weights are not this rank's.
    """
    before, after = _of_update(mine, resume), _of_update(theirs, resume)
    if before is None or after is None:
        return False  # this rank's slots are lost, and with them the promise of an exact result
    sums, others = before.sums, after.sums
    if sums is None or others is None:
        return bool(sums != others)
    stepped = after.updates if theirs.tag(END) == resume else range(len(others))
    return any(sums[number] != others[number] for number in stepped if number >= 0)


def _of_update(slots: Slots, resume: int) -> RankState | None:
    """Return the slot that a rank left of the update before the resume step, if any."""
    for slot, tag in ((END, resume), (GATE, resume - 1)):
        if slots.tag(slot) == tag:
            return read_state(slots, slot)
    return None


def take_changed(kit: Kit, saved: RankState, after: RankState, others: Iterable[Slots], resume: int) -> None:
    """Put Python state that the update region changed into `saved`, a rank's GATE slot, where it is the same on every rank.

    No rank has this rank's own values after the update: they stay as they were at the gate, and are reported as lost.

    A key that an earlier update region changed may have changed in this one as well, and not equally, even if both ranks' values were
    equal before (a meter that each body resets): without a further rank to compare with, this is noted as inexact.

    Args:
        kit: This rank's parts.
        saved: This function replaces its values.
        after: The END slot of another rank, which has the values.
        others: The slots of further ranks that should have the same, read only if something changed.
        resume: The step for which the END slots hold.
    """
    mine = saved.python
    changed = [*after.changed, *(key for key in saved.ever if key in mine and key not in after.changed)]
    if not changed:
        return
    slots = kit.ledger.slots
    at_start = read_state(slots, START).python if slots.tag(START) == resume - 1 else {}

    def grows_alike(key: str) -> bool:
        """Did an earlier update change it, and the current body not? Then ranks that were alike at the gate still are."""
        return key in saved.ever and at_start.get(key) == mine[key]

    at_gate = {**after.python, **after.changed}
    ends = [read_state(slots, END).python for slots in others if slots.tag(END) == resume]
    variables = kit.ledger.variables
    for key in [key for key in changed if key.startswith(PREFIX)]:
        # the script's value: take the others' if it was the same at the gate, else keep the gate's
        changed.remove(key)
        value = after.python.get(key)
        if key == WHOLE:
            mine.pop(key, None) if value is None else mine.update({key: value})
            continue
        if value is not None and at_gate.get(key) == mine.get(key) and all(end.get(key) == value for end in ends):
            known = ends or grows_alike(key)
            mine[key] = value
            if known:
                continue
        variables.lose([variables.shown(key)])
    lost: list[str] = []
    unsure: list[str] = []
    for key in changed:
        value = after.python[key]
        if at_gate.get(key) != mine[key] or any(end.get(key) != value for end in ends):
            lost += _parts_that_differ(key, mine[key], value)
            continue
        if not (kit.state.python.is_alike(key) or grows_alike(key)):  # before it is replaced
            unsure.append(key)
        mine[key] = value
    variables.lose(lost)
    if not ends and unsure:
        kit.context.note_inexact(Inexact.STATE_UNKNOWN, unsure)


def _parts_that_differ(key: str, mine: bytes, theirs: bytes) -> list[str]:
    """Return for people which parts of two state dicts differ; `job.state` and named variables are packed as state dicts, too."""
    one, other = serialization.decode(mine), serialization.decode(theirs)
    if not isinstance(one, dict) or not isinstance(other, dict):
        return [key]
    packed = [{name: serialization.pack(part, str(name)) for name, part in parts.items()} for parts in (one, other)]
    names = sorted(str(name) for name in {*one, *other} if packed[0].get(name) != packed[1].get(name))
    return names if key.partition(" ")[0] == "variables" else [f"{key}.{name}" for name in names]


def note_draws(context: Context, own: RankState, after: RankState) -> None:
    """Note as inexact the draws that this rank's streams may lack: those of its update, and of code between bodies, which is not rerun.

    Args:
        own: This rank's GATE or END slot.
        after: The END slot that describes the update: this rank's own if it has one, otherwise another rank's.
    """
    drew = own.drew | after.drew
    if drew & IN_UPDATE and after is not own:
        context.note_inexact(Inexact.UPDATE_USED_RNG)
    if drew & BETWEEN:
        context.note_inexact(Inexact.DREW_BETWEEN)
