"""Make the update of a rank without replica that died at its gate while the others went on, from its sealed gradients.

Its own arena has weights and optimizer state from before the update. update_region.py describes what a rank leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftrun.core.shared.board import Head
from ftrun.worker.memory import serialization
from ftrun.worker.repair.kit import Kit
from ftrun.worker.repair.plan import SNAPSHOTS, Refusal, missing_update
from ftrun.worker.repair.rank_state import RankState, read_state
from ftrun.worker.repair.recovery_points import END, GATE, SEALED, Slots
from ftrun.worker.repair.sources import NoSource, note_draws, take_changed
from ftrun.worker.repair.update_region import usual_after


def make(kit: Kit, resume: int, done: Sequence[Slots]) -> None:
    """Make the update before the resume step, as the slots of ranks that have `done` it tell.

    Raises:
        NoSource
    """
    state, slots = kit.state, kit.ledger.slots
    saved = read_state(slots, GATE)
    updates = missing_update(saved, _without_replica(done, resume), len(state.optimizers))
    if isinstance(updates, Refusal):
        raise NoSource(updates)
    if updates:
        if slots.tag(SEALED) != resume - 1:
            raise _lost("its gradients were not sealed when it died at its gate")
        state.python.apply(saved.python)
        state.set_grads(saved.alive, serialization.decode(slots.sound(SEALED)))
        state.arena.open()
        for number in updates:
            state.optimizers[number].step()
        state.absorb()
        kit.context.board[Head.MADE] = 1
    state.arena.sealed(resume)


def apply_to(saved: RankState, kit: Kit, resume: int, done: Sequence[Slots]) -> RankState:
    """Bring `saved`, the GATE slot of such a rank, to the end of its update, and return it.

    Raises:
        NoSource
    """
    alone = _without_replica(done, resume)[0]
    slots, *others = done
    after = read_state(slots, END)
    buffers = {entry.name for entry in kit.state.manifest.entries if entry.zone == "volatile"}
    written = buffers & {*after.buffers, *saved.ever}
    if written:
        raise _lost(f"{min(written)} is written after optimizer.step(), which this rank did not complete, and no other rank has its values")
    take_changed(kit, saved, after, others, resume)
    note_draws(kit.context, saved, after)
    saved.usual = usual_after(saved.usual, alone.updates)
    if alone.updates:
        if not alone.kept:
            saved.alive = [False] * len(saved.alive)
        kept = alone.kept and alone.grads is not None
        saved.grads = bytes(kit.ledger.slots.sound(SEALED)) if kept else None
    return saved


def _without_replica(done: Sequence[Slots], resume: int) -> list[RankState]:
    """Return the END slots of ranks without replica.

    Raises:
        NoSource: If there is none.
    """
    ends = [end for slots in done if (end := read_state(slots, END)).alone]
    if not ends:
        raise _lost(f"no rank completed the update before step {resume}: all of them died in it")
    return ends


def _lost(why: str) -> NoSource:
    return NoSource(Refusal(why, True, (SNAPSHOTS,)))
