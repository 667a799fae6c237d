"""The parts that a rank's recovery and its step loop share."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftrun.worker.comm.process_group import Registry
from ftrun.worker.link.observer import Observers
from ftrun.worker.link.position import Position
from ftrun.worker.link.run_link import Context
from ftrun.worker.repair.fully_sharded import FullySharded
from ftrun.worker.repair.handover import Kept
from ftrun.worker.repair.ledger import Ledger
from ftrun.worker.repair.rank_state import RankState
from ftrun.worker.repair.reducers import Reducers
from ftrun.worker.repair.snapshot import Snapshots
from ftrun.worker.state.logged_values import LoggedValues
from ftrun.worker.state.looks import Looks
from ftrun.worker.state.protected_state import ProtectedState


@dataclass
class PendingRecovery:
    """The work that a recovery leaves to the step loop."""

    resume: int = -1  # gate number at which a replacement enters the loop; -1 = it did, or this is none
    restart: RankState | None = None  # a slot's content, to be put back at the next hand-out
    again: bool = False  # with `restart`: a predecessor, or this rank before it went back, began that step
    redo: tuple[int, int] | None = None  # (generation, resume) of a recovery whose first new step is not done yet
    went_back: int = 0  # generation in which the state was last taken from the host snapshot


@dataclass(frozen=True)
class Kit:
    """One per process, made by `protect`."""

    context: Context
    registry: Registry
    state: ProtectedState
    ledger: Ledger
    reducers: Reducers
    sharded: FullySharded
    handover: Kept
    snapshots: Snapshots
    logged: LoggedValues
    looks: Looks
    pending: PendingRecovery = field(default_factory=PendingRecovery)

    @property
    def position(self) -> Position:
        return self.context.position

    @property
    def observers(self) -> Observers:
        return self.registry.observers

    def hand_over(self) -> bool:
        """Hand the memory to the fd store (again, if there is a new one). Return False if there is none now: call again."""
        return self.handover.send() and self.snapshots.handed_over()
