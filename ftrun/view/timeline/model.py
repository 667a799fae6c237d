"""Model one incident as lanes, bars and marks, from its journal line. Pure: no drawing, no clock, no files.

Times are ms after the fault (negative: before it). Every bar was measured; the model leaves out events that the journal lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ftrun.core.account import PARTS, Account
from ftrun.core.shared import mesh
from ftrun.core.shared.moment import AFTER_LOOP, CALL_AFTER, Moment
from ftrun.view.timeline.transfer import Transfer, transfer

# kinds of bars, named as in the figures
FORWARD, BACKWARD, SYNC, OPTIMIZER = "Forward", "Backward", "Gradient Synchronization", "Optimizer Step"
STOP, CLEAN, RESET = "Stop", "Clean", "Reset"
RESTORATION, ROLLBACK = "Restoration", "Rollback"
RELOAD = "Reload weights"  # bytes move from a replica, or from the host to every rank (figure 004)
TRAINING = (FORWARD, BACKWARD, SYNC, OPTIMIZER)
REPAIR = (STOP, CLEAN, RESET, RESTORATION, RELOAD, ROLLBACK)
HEALTHY, FAILED, SPARE, NEW = "healthy", "failed", "spare", "new worker"
SQUARES = 10  # squares that stand for the parameters of a rank
LANES_MOST = 8  # with more lanes than this, similar healthy lanes are folded
_SAME = 0.002  # most seconds between an injected fault and the start of the incident it causes


@dataclass(frozen=True)
class Bar:
    """A span of one worker's activity, in ms after the fault.

    `broken`: the activity was cut off. `again`: the step had begun once before. `new`: it ran in the repaired world.
    """

    kind: str
    begin: float
    end: float
    step: int
    broken: bool = False
    again: bool = False
    new: bool = False


@dataclass(frozen=True)
class Lane:
    """The bars of one process.

    `fails`: ms of its failure, None if it did not fail. `place`: its coordinates on the script's device mesh in words, ""
    without a mesh; `short`: the coordinates without dimension names.
    """

    label: str
    role: str
    rank: int
    cell: int
    bars: tuple[Bar, ...]
    fails: float | None = None
    place: str = ""
    short: str = ""

    @property
    def named(self) -> str:
        """Return the label with its mesh coordinates, such as "rank 3 (replicate 1, shard 1)"."""
        return f"{self.label} ({self.place})" if self.place else self.label

    def updates(self) -> list[Bar]:
        """Return the bars of the optimizer steps."""
        return [bar for bar in self.bars if bar.kind == OPTIMIZER]


@dataclass(frozen=True)
class Story:
    """One incident, ready to draw; times are ms after the fault.

    `step`: the step in flight at the fault. `resume`: the step at which all ranks resumed; `going_on` names the moment if
    they resumed outside a step. `last`: the last step whose update counts. `barriers`: for each step, the time at which every
    rank had completed its gradient synchronization.
    """

    run: str
    number: int
    total: int
    wall: float
    victims: tuple[dict[str, Any], ...]
    stuck: str
    restart: bool
    step: int | None
    resume: int
    last: int
    redone: int
    survivors: int
    detected: float
    resumed: float
    done: float
    parts: dict[str, float]
    sources: dict[int, dict[str, Any]]
    lanes: tuple[Lane, ...]
    folded: int
    barriers: tuple[tuple[int, float], ...]
    going_on: Moment
    injected: tuple[dict[str, Any], ...] = ()
    rollback: bool = False
    evidence: str = ""
    transfer: Transfer | None = None
    mesh: str = ""  # dimensions of the device mesh, "" without one

    @property
    def committed(self) -> bool:
        """Was the update of the step in flight kept?"""
        return self.step is not None and self.last >= self.step and not self.rollback

    @property
    def in_tail(self) -> bool:
        """Did the incident follow the last loop, where ftrun stops no rank? Then there is nothing to draw."""
        return self.going_on.phase == AFTER_LOOP and not any(bar.kind == STOP for lane in self.lanes for bar in lane.bars)

    @property
    def until(self) -> str:
        """Return the words for each rank's progress at the end of the incident."""
        return "had done a new step" if self.going_on.in_step else f"was past {self.going_on.what()}"

    @property
    def moments(self) -> list[tuple[float, str]]:
        """Return the times of the axis and their labels, without the last one."""
        then, flight = self.going_on, self.step if self.step is not None else self.resume
        again = " again" if then.phase == CALL_AFTER or (self.redone and not self.committed) else ""
        named = f"step {self.resume}" if then.in_step else then.what()
        begun = f"step {flight}" if then.in_step or flight != self.resume else then.what()
        return [(self.begins, begun), (0.0, "failure"), (self.resumed, f"{named}{again}")]

    @property
    def begins(self) -> float:
        """Return the time at which a drawing starts: the first bar before the fault."""
        starts = [bar.begin for lane in self.lanes for bar in lane.bars if bar.kind in TRAINING and bar.begin < 0]
        return min([*starts, -0.2 * max(self.done, 1.0)]) if not starts else min(starts)


def story(account: Account, number: int, run: str = "") -> Story:
    """Build incident `number` (from 1) of a run.

    Raises:
        IndexError: The run has no such incident.
    """
    if not 1 <= number <= len(account.incidents):
        raise IndexError(number)
    raw = account.incidents[number - 1]
    began = float(raw.get("began_ns", 0)) / 1e9
    victims = tuple(raw.get("victims", ()))
    parts = {name: float(raw["ms"][name]) for name in PARTS if name in raw.get("ms", {})}
    detected = parts.get("detect", 0.0)
    resumed = sum(parts.get(name, 0.0) for name in PARTS[:-1])
    steps = [v["step"] for v in victims if v.get("step") is not None]
    lanes = _lanes(raw, detected)
    shown = _folded(lanes)
    return Story(
        run=run,
        number=number,
        total=len(account.incidents),
        wall=account.wall + began - account.began,
        victims=victims,
        stuck=str(raw.get("stuck", "")),
        restart=bool(raw.get("restart")),
        step=max(steps) if steps else _in_flight(lanes),
        resume=int(raw.get("resume", 0)),
        last=int(raw.get("last", int(raw.get("resume", 0)) - 1)),
        redone=int(raw.get("redone", 0)),
        survivors=int(raw.get("survivors", 0)),
        detected=detected,
        resumed=resumed,
        done=float(raw.get("total_ms", 0.0)),
        parts=parts,
        sources=_sources(raw, victims),
        lanes=tuple(shown),
        folded=len(lanes) - len(shown),
        barriers=tuple(_barriers(lanes)),
        going_on=Moment.told({"step": raw.get("resume", 0), **raw.get("going_on", {})}),
        injected=tuple(f for f in account.faults if abs(float(f.get("t", 0.0)) - began) < _SAME),
        rollback=bool(raw.get("rollback")),
        evidence=str(raw.get("evidence", "")),
        transfer=transfer(raw),
        mesh=mesh.shape(raw.get("mesh", {}).get("dims", {})),
    )


def _in_flight(lanes: list[Lane]) -> int | None:
    return max((bar.step for lane in lanes for bar in lane.bars if bar.begin < 0), default=None)


def _sources(raw: dict[str, Any], victims: tuple[dict[str, Any], ...]) -> dict[int, dict[str, Any]]:
    """Return the source of each failed rank's state; ranks that failed in earlier incidents are left out."""
    failed = {str(v["rank"]) for v in victims}
    return {int(rank): source for rank, source in raw.get("sources", {}).items() if rank in failed}


# -- lanes ---------------------------------------------------------------------------------------------------------------


def _lanes(raw: dict[str, Any], detected: float) -> list[Lane]:
    failed = {int(v["cell"]): v for v in raw.get("victims", ())}
    spares = set(raw.get("spares", ()))
    ranks = {int(rank): times for rank, times in raw.get("ranks", {}).items()}
    kept = {(int(p["rank"]), int(p["cell"])): p["steps"] for p in raw.get("phases", ())}
    replaced = {int(v["rank"]) for v in failed.values()}
    places = raw.get("mesh", {}).get("ranks", {})
    lanes = []
    for cell, victim in failed.items():
        rank = int(victim["rank"])
        alive_again = (rank, cell) in kept and not _was_replaced(kept, rank, cell)
        bars = _training(kept.get((rank, cell), ()), 0.0, raw)
        if alive_again:  # the worker raised an exception and resumed by itself
            bars += _repair(ranks.get(rank, {}), detected, HEALTHY)
        lanes.append(Lane(f"rank {rank}", FAILED, rank, cell, tuple(bars), 0.0, *_place(victim.get("mesh"))))
        if alive_again:
            replaced.discard(rank)
            ranks.pop(rank, None)
    for rank in sorted(ranks):
        cells = [c for r, c in kept if r == rank and c not in failed]
        cell = cells[-1] if cells else -1
        role = HEALTHY if rank not in replaced else SPARE if cell in spares or not cells else NEW
        bars = _training(kept.get((rank, cell), ()), detected, raw)
        bars += _repair(ranks[rank], max([detected, *(b.end for b in bars if not b.new)]), role)
        label = f"rank {rank}" if role == HEALTHY else f"{role} {cell}" if cell >= 0 else f"rank {rank}"
        bars.sort(key=lambda b: b.begin)
        lanes.append(Lane(label, role, rank, cell, tuple(bars), None, *_place(places.get(str(rank)))))
    order = {HEALTHY: 0, FAILED: 1, SPARE: 2, NEW: 2}
    return sorted(lanes, key=lambda lane: (order[lane.role], lane.rank))


def _place(at: dict[str, int] | None) -> tuple[str, str]:
    return mesh.words(at), ", ".join(map(str, (at or {}).values()))


def _was_replaced(kept: dict[tuple[int, int], Any], rank: int, cell: int) -> bool:
    return any(r == rank and c != cell for r, c in kept)


def _training(rows: Iterable[list[Any]], end: float, raw: dict[str, Any]) -> list[Bar]:
    """Return the bars of the step in flight (two steps at most) and of step `resume` in the repaired world."""
    generation, bars = int(raw.get("generation", 0)), []
    rows = list(rows)
    flight = [int(v["step"]) for v in raw.get("victims", ()) if v.get("step") is not None]
    before = [row for row in rows if row[1] < generation and row[0] >= min(flight, default=0)]
    before = before if flight else before[-1:]
    after = [row for row in rows if row[1] >= generation and row[0] == int(raw.get("resume", 0))]
    for row in before[-2:] + after[-1:]:
        new = row[1] >= generation
        limit = float(raw.get("total_ms", 0.0)) if new else end
        bars += _bars(row, limit, new and any(r[0] == row[0] for r in before), new)
    return bars


def _bars(row: list[Any], limit: float, again: bool, new: bool) -> list[Bar]:
    step, _, _, *times = row
    kinds = list(zip(TRAINING, times[:4], strict=True))
    bars = []
    for at, (kind, begin) in enumerate(kinds):
        if begin is None:
            continue
        later = [t for t in times[at + 1 :] if t is not None]
        end = later[0] if later else limit
        if end >= begin:
            bars.append(Bar(kind, begin, end, step, not later, again, new))
    return bars


def _repair(times: dict[str, float], detected: float, role: str) -> list[Bar]:
    """Return the bars of a rank's repair, from detection until training resumes."""
    named = [(RESTORATION, "restore")] if role != HEALTHY else [(STOP, "stop"), (CLEAN, "clean"), (RESET, "reset")]
    if "moving" in times:
        named = [(kind, "moving" if kind == RESTORATION else key) for kind, key in named]
        named.append((RELOAD, "restore"))
    bars, at = [], detected
    for kind, key in named:
        if key in times:
            begin = times["moving"] if kind == RELOAD else at
            bars.append(Bar(kind, min(begin, times[key]), times[key], -1))
            at = times[key]
    if role != HEALTHY and "resume" in times:
        bars.append(Bar(ROLLBACK, at, times["resume"], -1))
    return bars


def _folded(lanes: list[Lane]) -> list[Lane]:
    """Return at most LANES_MOST lanes: failed and new workers, and the first and the slowest healthy ranks."""
    if len(lanes) <= LANES_MOST:
        return lanes
    healthy = [lane for lane in lanes if lane.role == HEALTHY]
    others = [lane for lane in lanes if lane.role != HEALTHY][: LANES_MOST - 2]
    room = max(2, LANES_MOST - len(others))
    slowest = sorted(healthy, key=lambda lane: -_stopped(lane))[: room // 2]
    chosen = {lane.rank for lane in [*healthy[: room - len(slowest)], *slowest]}
    return [*(lane for lane in healthy if lane.rank in chosen), *others]


def _stopped(lane: Lane) -> float:
    return max((bar.end for bar in lane.bars if bar.kind == STOP), default=0.0)


def _barriers(lanes: list[Lane]) -> Iterable[tuple[int, float]]:
    """Return each step's barrier time. A barrier opens for all ranks at once, so the earliest rank past it gives the time."""
    passed: dict[tuple[int, bool], float] = {}
    for lane in lanes:
        for bar in lane.updates():
            key = (bar.step, bar.new)
            passed[key] = min(bar.begin, passed.get(key, bar.begin))
    return sorted(((step, t) for (step, _), t in passed.items()), key=lambda b: b[1])


# -- parameters ----------------------------------------------------------------------------------------------------------


CONSISTENT, UPDATING = "Consistent Parameters", "Update Parameters"


def bands(story: Story) -> list[tuple[str, float, float]]:
    """Return the bands of figures 000 and 001 as (kind, begin, end), without gaps from the step in flight to the end.

    A band tells whether all ranks hold the same parameters or update them. A torn update lasts until training resumes.
    """
    updates = []
    for step, new in sorted(
        {(bar.step, bar.new) for lane in story.lanes for bar in lane.updates()}, key=lambda k: (k[1], k[0])
    ):
        bars = [bar for lane in story.lanes for bar in lane.updates() if (bar.step, bar.new) == (step, new)]
        torn = any(bar.broken for bar in bars) and not new
        end = story.resumed if torn or (not new and max(b.end for b in bars) > 0) else max(b.end for b in bars)
        updates.append((min(bar.begin for bar in bars), end))
    found, at = [], story.begins
    for begin, end in updates:
        if begin > at:
            found.append((CONSISTENT, at, begin))
        found.append((UPDATING, max(at, begin), end))
        at = max(at, end)
    return [*found, (CONSISTENT, at, story.done)] if at < story.done else found


def done_again(bar: Bar, story: Story) -> bool:
    """Does the bar belong to a step that some worker had begun before?"""
    redone = bool(story.redone) and not story.committed
    return bar.kind in TRAINING and (bar.again or (redone and bar.new and bar.step == story.resume))


@dataclass(frozen=True)
class Held:
    """The squares of figures 002 and 003: the updated share of a rank's parameters at `time`.

    The share holds from `since` to `until`, the barriers around `time`, because updates begin at a barrier. `last`: the
    process failed at `time`.
    """

    time: float
    share: float
    since: float
    until: float
    last: bool

    def place(self, at: Callable[[float], float], size: float, gap: float) -> tuple[float, int]:
        """Return the position of the first square and how many fit. `at` maps a time to a position; `size` is one square's."""
        begin, whole = at(self.time), SQUARES * size
        if not self.last:
            return begin, max(1, min(SQUARES, int((at(self.until) - begin) / size)))
        before = begin - gap - whole
        return (before if before >= at(self.since) else begin), SQUARES


def held(lane: Lane, story: Story) -> list[Held]:
    """Return the squares at the start of the step (not for a new worker), and at the failure or as training resumes."""
    times = [] if lane.role in (SPARE, NEW) else [story.begins]
    times.append(0.0 if lane.role == FAILED else story.resumed)
    found, barriers = [], [at for _, at in story.barriers]
    for time in times:
        share = 0.0 if time == story.begins else updated(lane, time, story)
        since = max((at for at in barriers if at <= time), default=story.begins)
        until = min((at for at in barriers if at > time), default=story.done)
        found.append(Held(time, share, since, until, lane.role == FAILED and time == 0.0))
    return found


def updated(lane: Lane, at: float, incident: Story) -> float:
    """Return the share (0 to 1) of the parameters in `lane` that hold the update of step `incident.step` at time `at`."""
    step = incident.step if incident.step is not None else incident.resume
    if lane.role in (SPARE, NEW):
        return 1.0 if incident.last >= step and not incident.rollback else 0.0
    if incident.rollback and at >= incident.resumed:
        return 0.0
    share = 0.0
    for bar in lane.updates():
        if bar.step != step or bar.begin > at:
            continue
        whole = not bar.broken and at >= bar.end
        share = 1.0 if whole else max(share, min(0.9, (at - bar.begin) / max(bar.end - bar.begin, 1e-9)))
        if bar.broken and lane.fails is not None:
            share = 0.5  # the journal does not hold the progress of a torn update
    return share
