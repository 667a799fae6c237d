"""Assemble the parts that guard a rank's state, for `protect`, and lay its memory out for step 0."""

from __future__ import annotations

from ftrun.worker.comm.process_group import Registry
from ftrun.worker.link.run_link import Context
from ftrun.worker.memory.arena import Arena
from ftrun.worker.repair.constants import Constants
from ftrun.worker.repair.fully_sharded import FullySharded
from ftrun.worker.repair.handover import Kept, use_gpu
from ftrun.worker.repair.kit import Kit
from ftrun.worker.repair.ledger import Ledger
from ftrun.worker.repair.recovery_points import Slots
from ftrun.worker.repair.reducers import Reducers
from ftrun.worker.repair.snapshot import Snapshots
from ftrun.worker.state.logged_values import LoggedValues
from ftrun.worker.state.looks import Looks
from ftrun.worker.state.protected_state import ProtectedState
from ftrun.worker.variables.variables import Variables


def kit(context: Context, groups: Registry, state: ProtectedState, variables: Variables, logged: LoggedValues) -> Kit:
    """Make the parts that a rank's recovery and its step loop share."""
    variables.passes_over(state.iterated)
    ledger = Ledger(state, variables, Constants(context, variables))
    snapshots = Snapshots(context, state, ledger)
    variables.retains = snapshots.every > 0
    reducers, sharded = Reducers(state.modules, groups), FullySharded(state.shards)
    looks = Looks(state, context.cell.words(), context.check_every)
    made = Kit(context, groups, state, ledger, reducers, sharded, Kept(context, state, ledger), snapshots, logged, looks)
    context.on_fd_store = made.hand_over
    return made


def lay_out(kit: Kit) -> None:
    """Lay out the memory of a rank's first incarnation and seal it for step 0."""
    rank, state = kit.context.rank, kit.state
    arena = Arena.create(rank, max(state.bytes_now(), 1), use_gpu(kit.context, state))
    kit.ledger.use(Slots.create(rank))
    state.move_in(arena)
    kit.reducers.record()
    kit.ledger.end(0, accumulating=False)
    arena.sealed(0)
    kit.hand_over()
