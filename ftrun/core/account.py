"""Keeps the account of a run: which ranks failed and when, the stages of each repair, its end and its cost.

One fold over events that carry their times: this file reads no clock, no file and no board. The launcher folds its decisions and
what it reads on the board; a view folds the journal, which has only the sums of the latter. Only the journal has lines of `config`,
`stall` and `fault`, so only a view computes lost times and the ratio.
Times are monotonic, in seconds; those of an `Incident` in ns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from ftrun.core.shared.moment import AFTER_LOOP, CALL_AFTER, LOOP_END, Moment

PARTS = ("detect", "stop", "clean", "reset", "restore", "resume", "first_step")  # of an incident, in their order
RESTARTS = ("restarting", "world_stopped", "peer_failed")  # messages of the controller as it restarts all workers
TRAINING, OVER = "RUNNING", ("ENDING", "ENDED")  # phases of the controller;
UNHURT = ("NEW", "STARTING", TRAINING)  # in all others but these it repairs, or starts again


@dataclass(frozen=True)
class Fact:
    """One fact by its `kind`: a journal line (an event, an order or a note), or something that only the launcher or the board knows."""

    t: float
    kind: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class Victim:
    """One rank that failed; the fields of a `Moment` say where. `seen_ms`: from the fault to its detection, None when the
    fault's time is not known. `fault` is a value of ftrun.core.faults.Fault, `evidence` a sentence that says how ftrun knows.
    """

    rank: int
    cell: int
    step: int | None
    phase: str
    cause: str
    seen_ms: float | None = None
    fault: str = ""
    evidence: str = ""
    epoch: int | None = None
    end: int = 0

    @property
    def moment(self) -> Moment:
        return Moment(self.phase, self.step, self.epoch, self.end)


@dataclass(frozen=True)
class OpenIncident:
    """An incident in progress, as the controller heard of it. `stages`: each phase of the controller, and when it began."""

    since: float
    victims: tuple[Victim, ...] = ()
    stages: tuple[tuple[str, float], ...] = ()
    said: str = ""
    restart: bool = False


@dataclass(frozen=True)
class Incident:
    """An incident as the board showed it: from the first failure until every rank has done a new step."""

    began: int
    detected: int
    victims: tuple[Victim, ...] = ()
    generation: int = 0
    resume: int = 0
    epoch: int | None = None  # that of `resume`, where the script has epochs
    end: int = 0  # steps of its loop
    then: str = ""  # phase with which all ranks continue, when that is outside a step
    redone: int = 0
    restart: bool = False
    rollback: bool = False  # everyone went back to the host snapshot of `resume`
    survivors: int = 0
    fault: str = ""  # of an incident without victims: the links
    evidence: str = ""
    last: int = -1  # step index of the last update that is part of the model
    stuck: str = ""  # the collective that everybody waited in, when no rank was to blame
    spares: tuple[int, ...] = ()  # cells that had been warm spares
    shift: int = 0  # step index minus gate number
    reached: int = 0  # steps that some rank had begun when the gate was closed first, as a gate number + 1

    def going_on(self) -> Moment:
        """Return where every rank continues after the repair."""
        return Moment(self.then, self.resume, None if self.rollback else self.epoch, self.end)


@dataclass(frozen=True)
class Account:
    """The sum of all facts so far; `then` adds more. `incidents` and `cut` hold the facts of the journal."""

    began: float = 0.0
    wall: float = 0.0  # unix seconds at `began`
    phase: str = "NEW"
    generation: int = 0
    holders: tuple[int, ...] = ()  # the cell of each rank
    protected: frozenset[int] = frozenset()  # cells
    training: float | None = None  # when the first step could begin
    open: OpenIncident | None = None
    incident: Incident | None = None
    since: float | None = None  # when the incident of yet unknown cost began
    incidents: tuple[dict[str, Any], ...] = ()  # those of known cost
    cut: dict[str, Any] | None = None  # the one that the end of the run cut off
    replaced: tuple[tuple[int, int], ...] = ()  # rank, and the cell that took it over
    restarts: int = 0  # worlds in which all workers started again,
    failed_attempts: int = 0  # and attempts that such a restart ended
    stalled: float = 0.0  # seconds of all standstills that are over, and in no incident
    stall: tuple[float, float] = (0.0, 0.0)  # when the newest of them began and ended
    stalled_since: float | None = None  # start of the present one; the board has it, not the journal
    faults: tuple[dict[str, Any], ...] = ()  # injected ones that fired
    exit_code: int | None = None
    ended: float | None = None

    def then(self, *events: Fact) -> Account:
        """Fold `events` in; skip kinds that are no part of the account."""
        known = (event for event in events if event.kind in _FOLDS)
        return reduce(lambda account, event: _FOLDS[event.kind](account, event.t, event.facts), known, self)

    @property
    def costs(self) -> tuple[dict[str, Any], ...]:
        """Return the facts of every incident, also of one that the end of the run cut off."""
        return self.incidents if self.cut is None else (*self.incidents, self.cut)

    @property
    def redone(self) -> int:
        """Count the steps done again."""
        return sum(int(facts.get("redone", 0)) for facts in self.costs)

    @property
    def lost_ms(self) -> float:
        """Sum the time of incidents and of steps done again."""
        return sum(map(cost_ms, self.costs), 0.0)

    def lost(self, now: float) -> float:
        """Return the seconds of incidents, repeated steps and standstills, with those in progress; `now` is monotonic."""
        begun = self.since if self.since is not None else self.stalled_since
        return self.lost_ms / 1000 + max(0.0, self.stalled + (0.0 if begun is None else now - begun))

    def effective(self, now: float) -> float | None:
        """Return the effective training time ratio: the share of its time that the run did not spend on starts, standstills and repairs.

        None before training began.
        """
        end = self.ended if self.ended is not None else now
        if self.training is None or end <= self.began:
            return None
        return max(0.0, min(1.0, (end - self.training - self.lost(end)) / (end - self.began)))


def cost_ms(facts: dict[str, Any]) -> float:
    """Return the cost of an incident: its time and that of the steps done again."""
    return float(facts["total_ms"]) + float(facts.get("again_ms", 0.0))


# ---- what a line of the journal changes --------------------------------------------------------------------------------


def _opened(account: Account, t: float, **more: Any) -> Account:
    """Update the open incident, or open one at `t`."""
    opened = replace(account.open or OpenIncident(t), **more)
    return replace(account, open=opened, since=t if account.since is None else account.since)


def _failed(account: Account, t: float, facts: dict[str, Any]) -> Account:
    cell, known = facts["worker"], account.open
    if cell not in account.holders or account.phase in OVER:
        return account
    cause = facts.get("cause") or facts.get("signature") or "?"
    victim = Victim(account.holders.index(cell), cell, facts.get("step"), facts.get("phase", ""), cause)
    return _opened(account, t, victims=(*(known.victims if known else ()), victim))


def _protected(account: Account, t: float, facts: dict[str, Any]) -> Account:
    protected = account.protected | {facts["worker"]}
    first = account.generation == 1 and protected.issuperset(account.holders)
    return replace(account, protected=protected, training=t if first else account.training)


def _ordered(account: Account, t: float, facts: dict[str, Any]) -> Account:
    workers = tuple(facts["workers"])
    replaced = dict.fromkeys((*account.replaced, *((rank, workers[rank]) for rank in facts["replaced"])))
    restarts = account.restarts + bool(facts.get("fresh") and facts.get("attempt"))
    return replace(account, holders=workers, replaced=tuple(replaced), restarts=restarts)


def _said(account: Account, t: float, facts: dict[str, Any]) -> Account:
    what = facts["what"]
    if what == "recovered":
        return replace(account, open=None)
    if what in RESTARTS:
        account = replace(_changed(account, restart=True), failed_attempts=account.failed_attempts + 1)
    elif what != "stuck":
        return account
    return _opened(account, t, said=facts.get("detail", ""), restart=what in RESTARTS)


def _answered(account: Account, t: float, facts: dict[str, Any]) -> Account:
    """Fold in the phase of the controller after its orders."""
    phase, before, known = str(facts["phase"]), account.phase, account.open
    account = replace(account, phase=phase, generation=facts["generation"])
    if phase == before:
        return account
    if phase == TRAINING and account.training is None:
        account = replace(account, training=t)  # later when the script protects its state
    if phase in OVER:
        return replace(account, open=None, since=None)
    if phase in UNHURT and (known is None or known.restart):
        return replace(account, open=None)
    stage = "FIRST_STEP" if phase in UNHURT else phase
    return _opened(account, t, stages=(*(known.stages if known else ()), (stage, t)))


def _over(account: Account, t: float, facts: dict[str, Any]) -> Account:
    account = replace(account, incidents=(*account.incidents, facts), since=None)
    return replace(account, stalled=account.stalled - _counted_twice(account))


def _stood_still(account: Account, t: float, facts: dict[str, Any]) -> Account:
    account = replace(account, stall=(facts["since"], facts["since"] + facts["seconds"]))
    return replace(account, stalled=account.stalled + facts["seconds"] - _counted_twice(account))


def _counted_twice(account: Account) -> float:
    """Return the seconds of the newest standstill within the newest incident: before a hang was detected, or in a repair."""
    if not account.incidents:
        return 0.0
    newest, (since, until) = account.incidents[-1], account.stall
    began = float(newest["began_ns"]) / 1e9
    return max(0.0, min(until, began + float(newest["total_ms"]) / 1e3) - max(since, began))


# ---- what the board showed of the incident that goes on ----------------------------------------------------------------


def _changed(account: Account, **more: Any) -> Account:
    return replace(account, incident=account.incident and replace(account.incident, **more))


def _struck(account: Account, t: float, facts: dict[str, Any]) -> Account:
    """Open an incident for a failure; one during a repair belongs to the open incident."""
    return account if account.incident else replace(account, incident=Incident(**facts))


def _victim(account: Account, t: float, facts: dict[str, Any]) -> Account:
    return _changed(account, victims=(*(account.incident.victims if account.incident else ()), Victim(**facts)))


def _closed(account: Account, t: float, facts: dict[str, Any]) -> Account:
    """Fold in that the gate closed after gate number `last`. The ranks repeat the steps beyond it that some rank had begun.

    `begun`: the moments of all ranks beyond `last`. A step's index is its gate number plus `shift`; its loop, in `epoch`, ends at `end`.
    """
    known, begun, resume = account.incident, facts["begun"], facts["last"] + 1
    if known is None:
        return account
    return _changed(
        account,
        shift=facts["shift"],
        epoch=facts["epoch"],
        end=facts["end"],
        last=facts["last"] + facts["shift"],
        reached=known.reached if known.generation else resume + bool(begun),
        redone=max(known.redone, int(any(m.in_step for m in begun))),
        then=_then(resume + facts["shift"], facts["end"], {m.phase for m in begun}),
    )


def _then(resume: int, end: int, begun: set[str]) -> str:
    """Return the phase with which all continue at step index `resume` of a loop of `end` steps; "" = in a step."""
    if not 0 < end <= resume:
        return ""
    if CALL_AFTER in begun:
        return CALL_AFTER
    return LOOP_END if LOOP_END in begun or (resume == end and AFTER_LOOP not in begun) else AFTER_LOOP


def _published(account: Account, t: float, facts: dict[str, Any]) -> Account:
    """Fold in a published world; `spares`: cells of warm spares that took a rank of it."""
    known, resume = account.incident, facts["resume"]
    if known is None:
        return account
    survivors = len(facts["workers"]) - len(facts["replaced"])
    account = _changed(account, generation=facts["generation"], survivors=survivors, rollback=facts["rollback"])
    if facts["tail"] and known.victims:  # a repair after the loop stops no rank and leaves the gate open
        first, spares = known.victims[0], tuple(sorted(facts["spares"]))
        at = first.step or 0
        return _changed(account, then=AFTER_LOOP, resume=at, last=at - 1, epoch=first.epoch, end=first.end, spares=spares)
    redone = max(known.redone, known.reached - resume) if facts["rollback"] else known.redone
    spares = tuple(sorted({*known.spares, *facts["spares"]}))
    return _changed(account, resume=max(resume + known.shift, 0), spares=spares, redone=redone)


_FOLDS: dict[str, Callable[[Account, float, dict[str, Any]], Account]] = {
    "config": lambda account, t, facts: replace(account, began=t, wall=float(facts.get("wall", 0.0))),
    "Died": _failed,
    "Raised": _failed,
    "Protected": _protected,
    "Publish": _ordered,
    "Say": _said,
    "End": lambda account, t, facts: replace(account, exit_code=int(facts["code"]), ended=t),
    "phase": _answered,
    "incident": _over,
    "stall": _stood_still,
    "fault": lambda account, t, facts: replace(account, faults=(*account.faults, facts["fired"])),
    # what is in no journal
    "cut off": lambda account, t, facts: replace(account, cut=facts),
    "struck": _struck,
    "victim": _victim,
    "closed": _closed,
    "published": _published,
    "dropped": lambda account, t, facts: replace(account, incident=None),
    "standing still": lambda account, t, facts: replace(account, stalled_since=facts["since"]),
}
