"""Holds the controller's configuration, workers and state: frozen data, JSON both ways, no decisions.

No clock, no I/O, no torch here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ftrun.control.events import Action
from ftrun.control.phases import CLEANING, RESETTING, RESTORING, RESUMING, RunPhase
from ftrun.control.policy import Overrides
from ftrun.core.errors import FtrunError

NOWHERE = -1  # in place of a cell: the incarnation that died was on another node


class IllegalEvent(FtrunError):
    """An event that cannot happen in this state: a defect of the agent. The state did not change."""


class WorkerStage(enum.IntEnum):
    """How far a worker is in answering a generation; a later stage implies the earlier ones."""

    NONE = 0
    STOPPED = 1
    CLEANED = 2
    READY = 3  # wants to meet the others; they wait for each rank that is not READY
    RESET = 4
    RESTORED = 5
    RESUMED = 6
    FIRST_DONE = 7


STAGES = {stage.name.lower(): stage for stage in WorkerStage if stage}


@dataclass(frozen=True)
class Config:
    """What the run was asked to do. Times in seconds; `max_replacements` is per rank and `replacement_window`."""

    nproc: int
    spares: int = 0
    max_restarts: int = 0
    max_replacements: int = 3
    replacement_window: float = 3600.0
    start_timeout: float = 300.0
    stop_timeout: float = 10.0
    shutdown_timeout: float = 30.0
    shared: bool = False  # one of several nodes: all of them decide when a world ends
    device_faults: int = 3  # per device and `replacement_window`
    wait_for_device: bool = False  # without a healthy device, wait for one instead of ending
    inexact_stops: bool = False  # a repair after which the result may not be called exact ends the run
    policy: Overrides = field(default_factory=Overrides)

    def __post_init__(self) -> None:
        if self.nproc < 1 or min(self.spares, self.max_restarts, self.max_replacements, self.device_faults) < 0:
            raise ValueError(f"impossible configuration: {self}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Config:
        """Unknown keys are left out, so that the launcher may keep more in the same object."""
        known = {f.name for f in fields(Config)}
        values = {k: v for k, v in raw.items() if k in known}
        if "policy" in values:
            values["policy"] = Overrides(**{k: _tuples(v) for k, v in values["policy"].items()})
        return Config(**values)


@dataclass(frozen=True)
class WorkerState:
    """A worker incarnation that is not known to be dead. `rank` None = a spare.

    `generation` is the newest one it ran in; `stage` is its answer to the state's generation.
    """

    cell: int
    rank: int | None
    generation: int
    started: bool = False
    parked: bool = False
    grouped: bool = False
    loop_done: bool = False
    finished: bool = False
    dying: bool = False  # its process is ending, and its exit code is not known yet: the world was stopped meanwhile
    dead: bool = False  # it died, and the controller is dealing with that
    stage: WorkerStage = WorkerStage.NONE

    @property
    def answered(self) -> WorkerStage:
        """Return its stage; a worker that left its loop or its script has nothing more to answer."""
        return WorkerStage.FIRST_DONE if self.loop_done or self.finished else self.stage


@dataclass(frozen=True)
class State:
    """Everything the controller remembers.

    `holder[r]`: the worker of rank r, None while it waits for a new one. `lost[r]`: the dead incarnation whose
    memory holds rank r's state (NOWHERE: it was on another node), None when the holder itself has it.
    `failures`: (what failed, generation) once each.
    """

    phase: RunPhase
    generation: int = 0
    attempt: int = 0
    next_worker: int = 0
    workers: tuple[WorkerState, ...] = ()
    holder: tuple[int | None, ...] = ()
    lost: tuple[int | None, ...] = ()
    protected: tuple[bool, ...] = ()
    stepped: bool = False  # some rank's optimizer took a step in this attempt
    tail: tuple[int, ...] = ()  # ranks replaced after the loop whose new holder is not there yet
    resume: int = -1  # gate number at which an incident's generation goes on, -1 = not known yet
    opened: bool = False  # the gate of an incident's generation opened again
    last: int | None = None  # of several nodes: the last gate that this one's word opened, None = its gate is not closed yet
    reported: WorkerStage = WorkerStage.NONE  # of several nodes: how far this one told the others that all of its ranks are
    recovering: bool = False  # "recovered" is still to be reported
    repaired: bool = False  # something was repaired in place in this attempt, or is
    doubted: bool = False  # a worker of this attempt has a reason not to call a result with repairs exact
    reconnected: bool = False  # in this incident all ranks reconnected, since one had no connection
    stood_still: tuple[int, ...] = ()  # ranks that held this incident up, and for that got another worker
    rollback: int = -1  # gate number of the host snapshot that everyone goes back to in this incident, -1 = nobody does
    # budgets
    deaths: tuple[tuple[int, float], ...] = ()  # (rank, t) of replacements
    failures: tuple[tuple[str, int], ...] = ()
    spare_failures: int = 0
    spares_given_up: bool = False
    service_deaths: tuple[tuple[str, float], ...] = ()
    restarts: int = 0
    startup_restarts: int = 0
    early_failures: int = 0  # attempts in a row that failed early
    attempt_since: float = 0.0
    store_ready: bool = True
    store_lost: bool = False  # the store died before every rank of the present world had met in it
    backoff_over: bool = True
    # devices, by UUID: those of the run in the order of LOCAL_RANK, and the one of each rank (() = shared by all ranks)
    devices: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    quarantine: tuple[str, ...] = ()
    device_faults: tuple[tuple[str, float], ...] = ()
    suspects: tuple[tuple[str, float], ...] = ()
    waiting: bool = False  # for a healthy device
    leaving: tuple[int, ...] = ()  # workers of the world before that were told to end and have not ended
    exit_code: int | None = None

    @property
    def armed(self) -> bool:
        """Has every rank protected its state in this attempt, so that faults are recovered in place?"""
        return bool(self.protected) and all(self.protected)

    @property
    def replaced(self) -> tuple[int, ...]:
        """Return the ranks whose holder (if any) does not have the rank's state yet."""
        return tuple(r for r, cell in enumerate(self.lost) if cell is not None)

    @property
    def told(self) -> str:
        """Return what people are told of the run: its phase, and in a repair the stage of the least advanced worker."""
        if self.phase is not RunPhase.REPAIRING:
            return str(self.phase)
        survivors = min((w.answered for w in self.survivors()), default=WorkerStage.CLEANED)
        if survivors < WorkerStage.CLEANED:
            return CLEANING if survivors >= WorkerStage.STOPPED else str(RunPhase.STOPPING)
        least = min(w.answered for w in self.ranked())
        if least < WorkerStage.RESET:
            return RESETTING
        return RESTORING if least < WorkerStage.RESTORED else RESUMING

    def worker(self, cell: int) -> WorkerState | None:
        return next((w for w in self.workers if w.cell == cell), None)

    def ranked(self) -> Iterator[WorkerState]:
        """Yield the workers that hold a rank, by rank."""
        return iter(sorted((w for w in self.workers if w.rank is not None), key=_rank))

    def survivors(self) -> list[WorkerState]:
        """Return the workers that have their rank's state."""
        return [w for w in self.ranked() if w.rank not in self.replaced]

    def spares(self) -> list[WorkerState]:
        return [w for w in self.workers if w.rank is None]

    def put(self, worker: WorkerState) -> State:
        """Return the state with `worker` in place of the one of the same cell (or added)."""
        others = tuple(w for w in self.workers if w.cell != worker.cell)
        return replace(self, workers=tuple(sorted((*others, worker), key=lambda w: w.cell)))

    def drop(self, cells: Iterable[int]) -> State:
        gone = set(cells)
        return replace(self, workers=tuple(w for w in self.workers if w.cell not in gone))

    def each(self, change: Callable[[WorkerState], WorkerState]) -> State:
        return replace(self, workers=tuple(change(w) for w in self.workers))


Result = tuple[State, tuple[Action, ...]]


def with_item(row: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """Return `row` with one item replaced."""
    return (*row[:index], value, *row[index + 1 :])


def _rank(worker: WorkerState) -> int:
    return -1 if worker.rank is None else worker.rank


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, (list, tuple)) else value
